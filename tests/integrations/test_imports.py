"""Frameworks are extras: nothing imports them before `enable()`."""

import subprocess
import sys


def test_importing_an_integration_imports_no_framework():
    code = (
        "import sys, paddle_flashmask as fm\n"
        "assert fm.integrations.paddlenlp.SUPPORTED_VERSIONS\n"
        "assert fm.integrations.paddleformers.SUPPORTED_VERSIONS\n"
        "loaded = {'paddle', 'paddlenlp', 'paddleformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
