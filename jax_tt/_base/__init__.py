"""What every room uses: arguments, dtypes, the environment, native modules, reports, words."""
