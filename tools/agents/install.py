"""The agents, installed by npm into a folder of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

VERSIONS = {
    "@anthropic-ai/claude-code": "2.1.332",
    "@openai/codex": "0.171.0",
    "opencode-ai": "1.18.33",
    "@qwen-code/qwen-code": "0.24.4",
    "node": "22.23.3",  # Qwen Code needs 22 or later, whatever the machine has
}
_SECONDS = 900


def install(folder: Path) -> Path:
    """Install what is missing or of another version; the folder of the programs."""
    modules = folder.resolve() / "node_modules"
    if any(_installed(modules / name) != version for name, version in VERSIONS.items()):
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("npm is not installed; the agents come from its registry (install Node.js)")
        folder.mkdir(parents=True, exist_ok=True)
        package = {
            "private": True,
            "dependencies": VERSIONS,
            # Newer versions of npm ask before they run these; without them the programs are placeholders.
            "allowScripts": dict.fromkeys(("@anthropic-ai/claude-code", "opencode-ai", "node"), True),
        }
        (folder / "package.json").write_text(json.dumps(package, indent=2) + "\n")
        subprocess.run([npm, "install", "--no-fund", "--no-audit"], cwd=folder, check=True, timeout=_SECONDS)
    return modules / ".bin"


def _installed(package: Path) -> str | None:
    try:
        return json.loads((package / "package.json").read_text())["version"]
    except FileNotFoundError:
        return None
