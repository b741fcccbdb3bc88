"""Chooses kinds and sizes of tables that fit into a given number of bytes."""
