"""Low-precision Adam for Optax: master parameters and moments in 8 and 16 bits, one pass a step."""

from optax_lowprec import implementations
from optax_lowprec.adam import adam
from optax_lowprec.adam import adamw
from optax_lowprec.adam import apply_gradients
from optax_lowprec.adam import scale_by_adam
from optax_lowprec.formats import StateFormat
from optax_lowprec.implementations import available_implementations
from optax_lowprec.report import memory_report
from optax_lowprec.report import MemoryReport
from optax_lowprec.sharding import state_shardings
from optax_lowprec.state import LowPrecisionAdamState
from optax_lowprec.state import master_params
from optax_lowprec.state import moments
from optax_lowprec.state import with_master_params

__version__ = "0.1.0"

__all__ = [
    "LowPrecisionAdamState",
    "MemoryReport",
    "StateFormat",
    "adam",
    "adamw",
    "apply_gradients",
    "available_implementations",
    "implementations",
    "master_params",
    "memory_report",
    "moments",
    "scale_by_adam",
    "state_shardings",
    "with_master_params",
]
