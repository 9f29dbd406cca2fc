"""One CSR by destination and all that derives from it, computed once and kept on the object."""

from stretto.graph.graph import Graph as Graph

PUBLIC = ("graph", "derived", "formats", "memo", "traced")
