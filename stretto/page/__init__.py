"""HTML pages, pictures and tables on a terminal; it knows nothing of what they show.

`frame` is a page and its tables, `svg` and `charts` the pictures, `captions` what to see in each, `document` what can
be shown so, `terminal` tables of rich, `text` numbers as people read them.
"""

PUBLIC = ("captions", "charts", "document", "frame", "svg", "terminal", "text")  # what other packages may import
