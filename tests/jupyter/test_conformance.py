"""``jupyter_kernel_test``, with everything it offers switched on (issue 6, "Conformance")."""

from __future__ import annotations

import os

import jupyter_kernel_test


class LemonTests(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """The messages of the kernel ``lemon``, launched by a bare manager, against the protocol's schemas."""

    kernel_name = "lemon"
    language_name = "python"
    file_extension = ".py"

    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "webf", "matches": {"webfetch"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('as asked')"
    code_execute_result = [
        {"code": "6*7", "result": "42"},
        {"code": "'lem' + 'on'", "result": "'lemon'"},
        {"code": "6*8", "result": "48"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('x^2'))", "mime": "text/latex"},
    ]
    code_history_pattern = "6[*]7"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "read"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        assert not os.path.exists(cls.km.connection_file)


class LemonWelcomeTests(jupyter_kernel_test.IopubWelcomeTests):  # type: ignore[misc]
    """A subscriber is greeted on iopub."""

    kernel_name = "lemon"
    support_iopub_welcome = True
