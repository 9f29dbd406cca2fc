"""What this machine can do, in one place: its facts, its clocks, the rates measured on it, its ceilings, its file.

`facts` says what it is; `timing` is the one way to time calls; `rates` are the few numbers that the planner needs in a
user's first step (two seconds); `probing` and `ceilings` measure a whole Machine, as `file` defines it, which may also
be read from a file; `store` keeps on disk what was measured or chosen. What ops, layers and processes add to a Machine
is measured by stretto.observe.this_machine.
"""

PUBLIC = ("ceilings", "facts", "file", "probing", "rates", "store", "timing")  # what other packages may import
