"""Lets vLLM load models that take images without torchvision, in each Python with this folder on PYTHONPATH.

For each such model vLLM imports a function of Pixtral's image processor, from a module that needs torchvision. This
file replaces that module by an empty one. Python runs a file named sitecustomize.py at its start.
"""

import sys
from types import ModuleType

pixtral = ModuleType("transformers.models.pixtral.image_processing_pixtral")
vars(pixtral)["_num_image_tokens"] = None
sys.modules[pixtral.__name__] = pixtral
