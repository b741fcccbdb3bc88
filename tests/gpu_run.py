"""Every op once or twice on a GPU, small enough for compute-sanitizer; compared with the reference on the CPU.

python -m tests.gpu_run
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from tests.helpers import SHAPES, assert_close, make_case
from tests.native_run import RULES, gradients, steps

# Of each shape and type what kernels differ by: three cores and more, odd sizes, storage.
CASES = [("d3", "float32"), ("d3-odd", "bfloat16"), ("d4", "float16"), ("d2", "float32")]


def main() -> None:
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    cpu = jax.devices("cpu")[0]
    for name, dtype in CASES:
        case = make_case(SHAPES[name], dtype, True)
        bags, g = case.bags(), jnp.asarray(case.g, jnp.float32)
        table = jax_tt.tt_to_dense(case.cores, case.shape.num_embeddings)
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        results = {"gradients": gradients(case.cores, bags, g, "ffi")}
        wanted = {}
        with jax.default_device(cpu):
            local = jax.device_put((case.cores, bags, g), cpu)
            wanted["gradients"] = gradients(*local, "reference")
        for rule in ("sgd", "adam") if dtype == "float32" else ("adagrad",):
            for kind, start in (("tt", case.cores), ("dense", table)):
                key = f"{kind} {rule}"
                fused = jax_tt.init_fused_table(start, RULES[rule])
                results[key] = steps(fused, bags, RULES[rule], g, "ffi")
                with jax.default_device(cpu):
                    local = jax.device_put((fused, bags), cpu)
                    wanted[key] = steps(*local, RULES[rule], jax.device_put(g, cpu), "reference")
        for key, leaves in results.items():
            if dtype != "float32" and key != "gradients":
                continue  # rounding is stochastic
            for k, (got, want) in enumerate(zip(leaves, wanted[key], strict=True)):
                got, want = (np.asarray(jnp.asarray(x, jnp.float32)) for x in (got, want))
                assert_close(got, want, tolerance, f"{name} {dtype} {key} {k}")
        print(f"{name} {dtype}: {', '.join(results)} agree with the reference ({platform})")


if __name__ == "__main__":
    main()
