"""The commands that the lab adds to `microclip`. Imports nothing heavy."""

from microclip.cli import Command

NEEDS = (
    *("transformers", "accelerate", "sklearn", "pyarrow", "jinja2", "plotly", "numpy", "optuna"),
    *("jiwer", "soundfile", "tensorboard", "PIL", "espeakng_loader", "psutil"),
)
INSTALL = "microclip-lab"

TRAIN = Command(
    "train a vision, speech or language model, or your own",
    "microclip_lab.command_line:train",
    resumes=True,
    needs=NEEDS,
    install=INSTALL,
)
SWEEP = Command(
    "compare micro-batch sizes, rules and learning rates by training them",
    "microclip_lab.command_line:sweep",
    resumes=True,
    needs=NEEDS,
    install=INSTALL,
)
REPRODUCE = Command(
    "rerun the paper's experiments at a small scale and check its claims",
    "microclip_lab.reproduction.command:reproduce",
    "microclip_lab.reproduction.config:ReproduceConfig",
    resumes=True,
    needs=NEEDS,
    install=INSTALL,
)
THEORY = Command(
    "what the paper's theory says about each micro-batch size",
    "microclip_lab.theory.command:run",
    "microclip_lab.theory.config:TheoryConfig",
    needs=("matplotlib",),
    install=INSTALL,
)
