"""What this machine can do, in one place: its facts, its clocks, the rates measured on it, its ceilings, its file.

`facts` says what it is; `timing` is the one way to time calls; `rates` are the few numbers that the planner needs in a
user's first step (two seconds); `probing` measures a whole Machine, as `file` defines it, which may also be read from a
file, and `ceilings` says what no op exceeds; `ranks` starts processes, and `link` measures what lies between two of
them; `store` keeps on disk what was measured or chosen. What ops and layers add to a Machine, which this package does
not know, is timed by the same probes in stretto.observe.this_machine.
"""

# What other packages may import.
PUBLIC = ("ceilings", "facts", "file", "link", "probing", "ranks", "rates", "store", "timing")
