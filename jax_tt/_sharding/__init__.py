"""Tables whose rows are divided over the devices of a mesh, page by page."""
