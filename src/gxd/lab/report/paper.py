"""The paper's numbers and settings (arXiv 2605.06834), as printed there, and the names of its methods."""

from __future__ import annotations

from typing import Any, NamedTuple

# Of runs, gxd_paper is the paper's rule and gxd the recommended one. Of assays, gxd is the paper's utility.
METHODS = {
    "backprop": "Backprop",
    "activation": "Activation",
    "contribution": "Contribution",
    "mc_contribution": "MC contribution",
    "mc_adaptable_contribution": "MC adaptable",
    "loss_gradient": "Loss gradient",
    "gxi": "GXI",
    "gxd": "GXD",
    "gxd_paper": "GXD (paper)",
    "gxd_all_logit": "GXD all-logit",
    "gxd_sketch": "GXD sketch (ours)",
    "gxd_kl": "GXD KL (ours)",
    "random": "Random",
}
ACTIVATIONS = {"relu": "ReLU", "tanh": "tanh", "silu": "SiLU", "leaky_relu": "LeakyReLU"}
MODELS = {"mlp": "MLP", "resnet18": "ResNet-18"}
EXPERIMENTS = {
    "permuted-mnist": "Permuted MNIST",
    "permuted-digits": "Permuted digits",
    "cifar100": "Continuous CIFAR-100",
}
OTHERS = {
    "permuted-mnist-small": "Small Permuted MNIST",
    "random-label-mnist": "Random-label MNIST",
    "cifar-5+1": "5+1 CIFAR",
    "slow-regression": "Slow regression",
}

# The five utilities of Table 1 and the three of the table of variants.
COMPARED = ("activation", "contribution", "mc_adaptable_contribution", "loss_gradient", "gxd")
VARIANTS = ("gxi", "gxd", "gxd_all_logit")

Column = tuple[str, str]  # model and activation
COLUMNS: tuple[Column, ...] = (("mlp", "relu"), ("mlp", "silu"), ("resnet18", "relu"))
METRICS = {"l1": "logit L1", "kl": "KL"}

_L1_KL = tuple[float, float, float, float]  # L1, its SE, KL, its SE


def _rows(**rows: tuple[_L1_KL, _L1_KL, _L1_KL]) -> dict[tuple[str, Column, str], tuple[float, float]]:
    cells = {}
    for utility, columns in rows.items():
        for column, (l1, l1_se, kl, kl_se) in zip(COLUMNS, columns, strict=True):
            cells[utility, column, "l1"] = (l1, l1_se)
            cells[utility, column, "kl"] = (kl, kl_se)
    return cells


# Table 1 (tab:spearman): Spearman's rho of the utility with the shock, mean and SE, by utility, column and metric.
SPEARMAN = _rows(
    activation=((0.903, 0.019, 0.892, 0.022), (0.146, 0.050, 0.131, 0.042), (0.766, 0.008, 0.620, 0.016)),
    contribution=((0.917, 0.019, 0.904, 0.022), (0.194, 0.041, 0.156, 0.037), (0.832, 0.006, 0.679, 0.016)),
    mc_adaptable_contribution=(
        (0.960, 0.013, 0.944, 0.016),
        (0.697, 0.056, 0.433, 0.051),
        (0.743, 0.011, 0.576, 0.019),
    ),
    loss_gradient=((0.719, 0.074, 0.733, 0.071), (0.726, 0.025, 0.446, 0.041), (0.751, 0.014, 0.680, 0.016)),
    gxd=((0.996, 0.001, 0.984, 0.003), (0.980, 0.002, 0.560, 0.051), (0.926, 0.003, 0.803, 0.012)),
)
# The appendix (tab:app_spearman_variants).
SPEARMAN_VARIANTS = _rows(
    gxi=((0.970, 0.006, 0.957, 0.009), (0.469, 0.080, 0.296, 0.062), (0.892, 0.004, 0.793, 0.011)),
    gxd=((0.996, 0.000, 0.984, 0.003), (0.980, 0.002, 0.560, 0.051), (0.926, 0.003, 0.803, 0.012)),
    gxd_all_logit=((0.999, 0.000, 0.984, 0.003), (0.997, 0.000, 0.568, 0.050), (0.937, 0.002, 0.783, 0.015)),
)
# The variance of rounding to three printed digits. Without it a printed SE of .000 would make any distance infinite.
ROUNDING_VARIANCE = 0.001**2 / 12


class Setting(NamedTuple):
    """One row of a configuration table. ``value`` is compared with ``field`` of the runs; a tuple allows any of it."""

    label: str
    text: str
    field: str | None = None
    value: Any = None


_RESET_METHODS = ("backprop", "contribution", "mc_adaptable_contribution", "gxd_paper")

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "permuted-mnist": (
        Setting("Hidden layers", "4", "depth", 4),
        Setting("Units per layer", "256", "width", 256),
        Setting("Activations", "ReLU, SiLU, LeakyReLU, tanh", "activation", ("relu", "silu", "leaky_relu", "tanh")),
        Setting("LayerNorm", "none; tested separately", "layer_norm", (False, True)),
        Setting("Tasks", "800", "tasks", 800),
        Setting("Epochs per task", "1", "epochs", 1),
        Setting("Batch size", "16", "batch_size", 16),
        Setting("Momentum", "0", "momentum", 0.0),
        Setting("Learning rate", "backprop 0.1, resets 0.3 (grid 0.1, 0.3)", "lr", (0.1, 0.3)),
        Setting("Replacement rate", "1e-4 ReLU/tanh, 1e-3 SiLU/LeakyReLU", "rate", (0.0, 1e-4, 1e-3)),
        Setting("Maturity", "100 (of the CBP settings it follows)", "maturity", 100),
        Setting("Decay", "0.99", "decay", 0.99),
        Setting("Bias compensation", "yes", "compensate", True),
        Setting("Methods", "backprop and five utilities", "method", (*_RESET_METHODS, "loss_gradient", "gxi")),
        Setting("Seeds", "15"),
    ),
    "cifar100": (
        Setting("Activation", "ReLU", "activation", "relu"),
        Setting("Tasks", "500 pairs of classes", "tasks", 500),
        Setting("Epochs per task", "200", "epochs", 200),
        Setting("Batch size", "100", "batch_size", 100),
        Setting("Momentum", "0.9", "momentum", 0.9),
        Setting("Weight decay", "0", "weight_decay", 0.0),
        Setting("Learning rate", "0.1", "lr", 0.1),
        Setting("Replacement rate", "1e-4", "rate", (0.0, 1e-4)),
        Setting("Maturity", "1000", "maturity", 1000),
        Setting("Bias compensation", "yes", "compensate", True),
        Setting("Methods", "backprop, Contribution, MC adaptable, GXD", "method", _RESET_METHODS),
        Setting("Seeds", "10"),
    ),
    "assay-mlp": (
        Setting("Data", "Permuted MNIST", "data", "permuted-mnist"),
        Setting("Hidden layers", "4", "depth", 4),
        Setting("Units per layer", "256", "width", 256),
        Setting("Activations", "ReLU, SiLU, LeakyReLU, tanh", "activation", ("relu", "silu", "leaky_relu", "tanh")),
        Setting("Learning rate", "0.01", "lr", 0.01),
        Setting("Batch size", "64", "batch_size", 64),
        Setting("Tasks", "30", "tasks", 30),
        Setting("Epochs per task", "1", "epochs", 1),
        Setting("Checkpoints after tasks", "0, 5, 10, 20, 30", "checkpoints", [0, 5, 10, 20, 30]),
        Setting("Training images", "all", "train_size", None),
        Setting("Units clamped per layer", "all", "units_per_group", None),
        Setting("Calibration samples", "2048", "calibration", 2048),
        Setting("Probe samples", "2048", "probe", 2048),
        Setting("Seeds", "3"),
    ),
    "assay-resnet18": (
        Setting("Data", "CIFAR-100, 450 images per class", "data", "cifar100"),
        Setting("Learning rate", "0.1, times 0.2 at epochs 60, 120, 160", "lr", 0.1),
        Setting("Learning rate drops", "60, 120, 160", "lr_drops", [60, 120, 160]),
        Setting("Momentum", "0.9", "momentum", 0.9),
        Setting("Weight decay", "5e-4", "weight_decay", 5e-4),
        Setting("Batch size", "90", "batch_size", 90),
        Setting("Epochs", "200", "epochs", 200),
        Setting("Checkpoints after epochs", "60, 120, 160, 200", "checkpoints", [60, 120, 160, 200]),
        Setting("Training images", "all", "train_size", None),
        Setting("Units clamped per layer", "all", "units_per_group", None),
        Setting("All-logit scores on", "all calibration samples", "all_logit_examples", None),
        Setting("Sum over positions", "absolute at each (so it seems)", "positions", "abs"),
        Setting("Calibration samples", "2048", "calibration", 2048),
        Setting("Probe samples", "2048", "probe", 2048),
        Setting("Seeds", "3"),
    ),
}
ASSAY_DATA = {"mlp": "permuted-mnist", "resnet18": "cifar100"}
SEEDS = {"permuted-mnist": 15, "cifar100": 10, "assay-mlp": 3, "assay-resnet18": 3}
TASKS = {"permuted-mnist": 800, "cifar100": 500}
LAST_CHECKPOINT = {"mlp": 30, "resnet18": 200}


def model_kind(model: str) -> str:
    """``mlp`` and ``resnet18`` however they are spelled; any other model is itself."""
    plain = model.lower().replace("-", "").replace("_", "")
    return plain if plain in MODELS else model


def column_label(column: Column) -> str:
    """For example "MLP SiLU". The ResNet of the paper is always ReLU, so that is not said."""
    model, activation = column
    name = MODELS.get(model, model)
    return name if model == "resnet18" and activation == "relu" else f"{name} {ACTIVATIONS.get(activation, activation)}"


def method_label(method: str) -> str:
    """The name of a method for people."""
    return METHODS.get(method, method)


def experiment_label(experiment: str) -> str:
    """The name of an experiment for people: the paper's, if it is the paper's."""
    return {**EXPERIMENTS, **OTHERS}.get(experiment, experiment)


def method_order(method: str) -> tuple[int, str]:
    """Sorts methods as the paper's tables do, unknown ones last."""
    names = list(METHODS)
    return (names.index(method) if method in names else len(names), method)
