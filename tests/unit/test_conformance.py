"""The kernel as every Jupyter front end expects it: jupyter_kernel_test's conformance suite."""

from __future__ import annotations

import unittest
from typing import ClassVar

from jupyter_kernel_test import KernelTests


class LemonKernelTests(KernelTests):  # type: ignore[misc]
    """Each claim is one of the suite's own tests."""

    kernel_name = "lemon"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples: ClassVar = ["1", "print('hello')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result: ClassVar = [{"code": "1+2+3", "result": "6"}]
    code_display_data: ClassVar = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"}
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"


del KernelTests

if __name__ == "__main__":
    unittest.main()
