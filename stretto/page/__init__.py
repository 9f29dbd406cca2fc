"""HTML pages, pictures and tables on a terminal; it knows nothing of what they show.

`frame` is a page and its tables, `svg` and `charts` the pictures, `captions` what to see in each, `terminal` tables of
rich, `text` numbers as people read them.
"""

PUBLIC = ("captions", "charts", "frame", "svg", "terminal", "text")  # what other packages may import
