"""Training: warm-up on the main thread, then one worker thread per replica, kept equal by summed gradients."""

from dflash_core.training.checkpoints import BestWeights, TrainingCheckpoint, TrainingState, newest_training_checkpoint
from dflash_core.training.course import OPERATIONAL
from dflash_core.training.evaluator import Evaluation, Judge
from dflash_core.training.guard import CompileGuard
from dflash_core.training.metrics import EVALUATIONS, bottleneck_in_words, read_metrics
from dflash_core.training.ranks import Ranks, check_launcher, this_rank, under_torchrun
from dflash_core.training.recent import RecentMetrics
from dflash_core.training.schedule import learning_rate
from dflash_core.training.session import TrainingSession
from dflash_core.training.sync import GradientSync
from dflash_core.training.trainer import DrafterTrainer, TrainingResult, train
from dflash_core.training.warming import WarmUpReport, count_steps, initial_drafter, warm_up

__all__ = [
    "EVALUATIONS",
    "OPERATIONAL",
    "BestWeights",
    "CompileGuard",
    "DrafterTrainer",
    "Evaluation",
    "GradientSync",
    "Judge",
    "Ranks",
    "RecentMetrics",
    "TrainingCheckpoint",
    "TrainingResult",
    "TrainingSession",
    "TrainingState",
    "WarmUpReport",
    "bottleneck_in_words",
    "check_launcher",
    "count_steps",
    "initial_drafter",
    "learning_rate",
    "newest_training_checkpoint",
    "read_metrics",
    "this_rank",
    "train",
    "under_torchrun",
    "warm_up",
]
