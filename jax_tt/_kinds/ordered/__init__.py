"""Tables with an order of ids."""
