"""What a batch is: bags, split ids, keys, orders of ids."""
