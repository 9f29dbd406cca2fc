"""What a step of a model does, op by op: what stretto.profile and stretto.analyze both look through.

`workload` is a step that runs plain, traced or timed; `trace` has its ops with their costs (`costs`, `kernel_costs`),
`lift` writes symbols over their sizes, `look` does so for whatever was passed; `classify` finds the layers, `predict`
turns counts into time, `put_back` leaves a model as it was. `this_machine` is the machine file of this machine.
"""

PUBLIC = ("agreement", "classify", "costs", "inputs", "layer", "lift", "look", "models", "nested", "peak_memory",
          "predict", "put_back", "specs", "subject", "this_machine", "trace", "workload")  # fmt: skip
