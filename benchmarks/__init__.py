"""What measures stretto, in the source tree alone: suites, studies, their results and the tables of the docs."""
