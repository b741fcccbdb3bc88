"""Operations on tables and arrays. What kinds register for the functions of `jax_tt._table` is loaded with them."""

import jax_tt._kinds.cached.change
import jax_tt._kinds.cached.maintain
import jax_tt._kinds.dense.change
import jax_tt._kinds.hashed.change
import jax_tt._kinds.ordered.change
import jax_tt._kinds.sharded.best
import jax_tt._kinds.sharded.change
import jax_tt._kinds.tensor_train.change  # noqa: F401
