"""Memory that is used again: what the process keeps, large pages, results in the place of earlier ones."""

PUBLIC = ("allocator", "pages", "pool")
