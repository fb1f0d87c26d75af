"""``hymo report``: one page of a run, or of several beside each other. Nothing here loads torch."""
