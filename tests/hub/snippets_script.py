"""Run the snippets of model cards, as if they were pasted into a fresh process."""

import json
import re
from pathlib import Path


for name, card in json.loads(Path("cards.json").read_text()).items():
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    exec(snippet, {})
    if name != "unet":
        Path("image.png").rename(f"{name}.png")
