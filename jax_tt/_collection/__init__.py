"""Collections of tables: many tables, looked up by feature in one call, with one differentiation rule."""
