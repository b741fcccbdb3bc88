"""Update rules that run inside the backward pass of a fused operation."""

from jax_tt.optimizers._base import ChangesAll as ChangesAll
from jax_tt.optimizers._base import Optimizer as Optimizer
from jax_tt.optimizers._base import ReadsScaled as ReadsScaled
from jax_tt.optimizers._base import Slot as Slot
from jax_tt.optimizers._base import at_step as at_step
from jax_tt.optimizers.adagrad import Adagrad as Adagrad
from jax_tt.optimizers.adagrad import AdagradMomentum as AdagradMomentum
from jax_tt.optimizers.adagrad import RowWiseAdagrad as RowWiseAdagrad
from jax_tt.optimizers.adam import LAMB as LAMB
from jax_tt.optimizers.adam import Adam as Adam
from jax_tt.optimizers.adam import PartialRowWiseAdam as PartialRowWiseAdam
from jax_tt.optimizers.adam import PartialRowWiseLAMB as PartialRowWiseLAMB
from jax_tt.optimizers.averaged_adagrad import (
    EMAInPlaceRowWiseAdagrad as EMAInPlaceRowWiseAdagrad,
)
from jax_tt.optimizers.averaged_adagrad import (
    EnsembleRowWiseAdagrad as EnsembleRowWiseAdagrad,
)
from jax_tt.optimizers.counted_adagrad import (
    CounterRowWiseAdagrad as CounterRowWiseAdagrad,
)
from jax_tt.optimizers.counted_adagrad import CowClip as CowClip
from jax_tt.optimizers.counted_adagrad import (
    GlobalDecayRowWiseAdagrad as GlobalDecayRowWiseAdagrad,
)
from jax_tt.optimizers.custom import Custom as Custom
from jax_tt.optimizers.ftrl import FTRL as FTRL
from jax_tt.optimizers.native import RULES as RULES
from jax_tt.optimizers.native import register as register
from jax_tt.optimizers.row_gradients import GradientsOfRows as GradientsOfRows
from jax_tt.optimizers.row_gradients import RowGradients as RowGradients
from jax_tt.optimizers.rowwise_rmsprop import RowWiseRMSProp as RowWiseRMSProp
from jax_tt.optimizers.sgd import LARSSGD as LARSSGD
from jax_tt.optimizers.sgd import SGD as SGD
