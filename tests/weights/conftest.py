"""timm has an environment of its own (`make zoo-timm`): its tests are collected there and nowhere else."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("timm") else ["test_zoo_timm.py"]
