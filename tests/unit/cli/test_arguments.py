"""Flags of each role (kind of process): an impossible value is refused in one line, before any work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import specdec
from specdec.inference import VERSION
from specdec.inference.cli.app import EXIT_USAGE, main, prepared
from specdec.inference.cli.prompts.source import read_prompts
from specdec.inference.cli.roles import worker
from specdec.inference.cli.roles.registry import ROLES, parser_of, settings_of
from specdec.inference.cli.roles.worker import WorkerSettings
from specdec.inference.config import BUNDLED_DRAFT
from specdec.inference.errors import ConfigError
from specdec.inference.serving.models import fused_config
from tests.conftest import ModelDirectories


def usage_error(*arguments: str | Path) -> None:
    """Run a command with these arguments; assert that it ends with the exit code of a usage error."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exc:  # argparse
        code = int(exc.code or 0)
    assert code == EXIT_USAGE


def run(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run specdec.main with `program` as sys.argv[0]; return its exit code."""
    monkeypatch.setattr("sys.argv", [program, *arguments])
    try:
        return specdec.main()
    except SystemExit as exc:
        return int(exc.code or 0)


@pytest.mark.parametrize(
    ("program", "arguments", "name"),
    [
        ("/usr/bin/specdec", ["draft", "--help"], "specdec draft"),
        ("/x/specdec/__main__.py", ["draft", "--help"], "specdec draft"),
        ("main.py", ["--role", "draft", "--help"], "main.py --role draft"),
        ("/usr/bin/specdec", ["--help"], "specdec ROLE"),
        ("main.py", ["--help"], "main.py --role ROLE"),
        ("/usr/bin/specdec", ["compare", "--help"], "specdec compare"),
        ("/usr/bin/specdec", ["study", "--help"], "specdec study"),
        ("/usr/bin/specdec", ["diff", "--help"], "specdec diff"),
    ],
)
def test_a_program_calls_itself_as_it_was_called(
    program: str, arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of a program shows the name by which the program was called, and has all of its commands.

    Regression: the installed command called itself main.py, and lacked compare, study and diff.
    """
    assert run(program, arguments, monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {name} ")
    assert ("main.py" in text) == ("main.py" in program)
    assert all(role in text for role in ROLES) or "ROLE" not in name
    if "--role" not in arguments:
        assert run(program, [*arguments[:-1], "--nonsense"], monkeypatch) == EXIT_USAGE
        assert ("main.py" in capsys.readouterr().err) == ("main.py" in program)


def test_both_programs_print_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for program in ("specdec", "main.py"):
        assert run(program, ["--version"], monkeypatch) == 0
        assert capsys.readouterr().out == f"specdec {VERSION}\n"


def test_an_unknown_flag_gets_two_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown flag gets an error of two lines, of which the first suggests the flag that was probably meant.

    Regression: the error stood below thirty lines of usage, without the flag that was meant.
    """
    assert run("specdec", ["draft", "--promt", "x", "--seeed=3"], monkeypatch) == EXIT_USAGE
    fault, hint = capsys.readouterr().err.splitlines()
    assert fault.startswith("error: unrecognized arguments: --promt x --seeed=3 (")
    assert "did you mean --prompt --seed?)" in fault
    assert hint == "`specdec draft --help` shows the flags"


@pytest.mark.parametrize(("role", "arguments"), [
    ("fused_target", "--http-port 8000 --no-prefix_caching --no-adaptive-gamma --max-waiting=3"),
    ("draft", "--target-host localhost:1 --max-new-tokens 5"),
    ("token", "--auth-file x --name n --grant ops --speaks-for-others"),
])  # fmt: skip
def test_dashes_are_underscores(role: str, arguments: str) -> None:
    """Every command takes flags with dashes in place of underscores.

    Regression: `compare` took flags with dashes, while other commands refused them.
    """
    spelled = re.sub(r"(?<=\w)-", "_", arguments).replace("--no_", "--no-")
    assert settings_of(role, arguments.split()) == settings_of(role, spelled.split())


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--model", "./nowhere/model"), "nowhere/model: no such directory"),
        (("--model", "no/such/directory"), "no/such/directory: no such directory"),
        (("--revision", "old"), "--revision old"),
    ],
)
def test_what_no_hub_can_have_is_named(flags: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names a path that does not exist, or a --revision given for a model that is not from a model hub.

    Regression: `./nowhere/model` was taken for the name of a model on a hub, and the error was that the hub could not
    be reached.
    """
    usage_error("--role", "verify_target", *flags, "--prompt", "x")
    (line,) = capsys.readouterr().err.splitlines()
    assert fault in line


@pytest.mark.parametrize("name", ["vllm_config", "vllm-config", "fused_target", "fused-target"])
def test_names_of_roles_have_two_spellings(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role (kind of process) can be named with dashes or with underscores; its help has underscores.

    Regression: `fused-target` was unknown, and so was `vllm_config`.
    """
    for arguments in ([name, "--help"], ["help", name], ["--role", name, "--help"]):
        assert run("specdec", arguments, monkeypatch) == 0
        assert capsys.readouterr().out.startswith(f"usage: specdec {name.replace('-', '_')} ")


def test_an_attached_draft_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`draft --attach` is the same as role `worker`, for the flags that both have."""
    served: list[WorkerSettings] = []

    async def keep(settings: WorkerSettings) -> int:
        served.append(settings)
        return 0

    monkeypatch.setattr(worker, "run", keep)
    flags = [
        "--attach",
        "a:1",
        "--serve",
        "--model",
        "ngram",
        "--gamma",
        "3",
        "--branches",
        "1",
        "--tls_ca",
        "ca.pem",
        "--probe_port",
        "7",
    ]
    assert main(["--role", "draft", *flags]) == 0
    own: WorkerSettings = settings_of("worker", flags)
    assert served == [replace(own, server=served[0].server, observe=served[0].observe)]
    assert (
        (own.server.port, own.server.probe_port) == (served[0].server.port, served[0].server.probe_port) == (50052, 7)
    )


def test_a_draft_without_tokenizer_is_refused_before_the_target_loads(tmp_path: Path) -> None:
    """A draft whose directory has no tokenizer is refused before the target is loaded.

    Regression: a large target was loaded for minutes first, and then Transformers wrote five lines about the
    draft.
    """
    for file in BUNDLED_DRAFT.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json there; copy the files tokenizer\*"):
        prepared(settings_of("fused_target", ["--draft_model", str(tmp_path)]))


def test_keys_of_a_file_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("http-port = 8000\n[fused-target]\nadaptive-gamma = false\n")
    settings = settings_of("fused_target", ["--config", str(file)])
    assert settings == settings_of("fused_target", ["--http_port", "8000", "--no-adaptive_gamma"])


def test_several_prompts_are_all_completed() -> None:
    """Every `--prompt` of a command line is completed.

    Regression: of two `--prompt` flags the last was used, without a message about the first.
    """
    settings = settings_of("draft", ["--prompt", "a", "--prompt", "b"])
    assert read_prompts(settings.prompts.prompt, settings.prompts.prompt_text) == ["a", "b"]


@pytest.mark.parametrize("arguments", [[], ["--port", "1"], ["--role"]])
def test_a_role_is_needed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    usage_error(*arguments)
    assert "--role" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fused_targt", "fused_target"), ("compar", "compare"), ("serve", "fused_target"), ("xyz", None)],
)
def test_a_misspelt_command_names_the_one_meant(
    name: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error about a misspelt command suggests the command that was probably meant.

    Regression: the error listed the roles without a suggestion, and without `compare`.
    """
    usage_error("--role", name)
    error, *listed = capsys.readouterr().err.splitlines()
    assert error == f"error: no command is called {name}" + (f" (did you mean {meant}?)" if meant else "")
    assert {*ROLES, "compare", "study", "diff"} <= {line.split()[0] for line in listed}


@pytest.mark.parametrize("role", ROLES)
def test_flags_keep_their_underscores(role: str) -> None:
    assert not re.findall(r"--[a-z]+-[a-z-]+", re.sub("--no-", "--no_", parser_of(role).format_help()))


@pytest.mark.parametrize("role", ["target", "draft", "fused_target", "fused_client", "gateway", "verify_fused"])
def test_unknown_flags_are_refused(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that a role does not know is refused, and so is a known flag's abbreviation."""
    usage_error("--role", role, "--no_such_flag")
    assert "--no_such_flag" in capsys.readouterr().err
    usage_error("--role", role, "--log", "info")


SAMPLING = [
    (("--temperature", "-1"), "temperature -1.0 is outside 0..100"),
    (("--temperature", "101"), "temperature 101.0 is outside 0..100"),
    (("--temperature", "nan"), "temperature nan is outside 0..100"),
    (("--top_p", "0"), "top_p 0.0 is outside (0, 1]"),
    (("--top_p", "1.5"), "top_p 1.5 is outside (0, 1]"),
    (("--top_k", "-1"), "top_k -1 is outside 0..4294967295"),
    (("--top_k", str(2**40)), f"top_k {2**40} is outside 0..4294967295"),
    (("--min_p", "2"), "min_p 2.0 is outside [0, 1]"),
    (("--seed", "-1"), "seed -1 is outside 0..18446744073709551615"),
    (("--seed", str(2**64)), f"seed {2**64} is outside 0..18446744073709551615"),
    (("--max_new_tokens", "0"), "max_new_tokens 0 is outside 1..4294967295"),
    (("--max_new_tokens", str(10**12)), f"max_new_tokens {10**12} is outside 1..4294967295"),
    (("--batch", "0"), "batch 0 is outside 1..4096"),
]
DIALLING = [
    (("--gamma", "-1"), "gamma -1 is outside 0..64"),
    (("--gamma", "65"), "gamma 65 is outside 0..64"),
    (("--port", "0"), "port 0 is outside 1..65535"),
    (("--port", "70000"), "port 70000 is outside 1..65535"),
    (("--deadline_s", "0"), "deadline_s 0.0 is not above 0"),
    (("--deadline_s", "nan"), "deadline_s nan is not above 0"),
    (("--connect_timeout_s", "-1"), "connect_timeout_s -1.0 is not above 0"),
]
LOADING = [
    (("--sequence_length", "1"), "sequence_length 1 is below 2"),
    (("--threads", "-1"), "threads -1 is below 0"),
    (("--model", "/nowhere"), "model /nowhere: no such directory: / has no nowhere; one with config.json is expected"),
]
SERVING = [
    (("--max_waiting", "-1"), "max_waiting -1 is below 0"),
    (("--grace_s", "-1"), "grace_s -1.0 is below 0"),
    (("--grace_s", "inf"), "grace_s inf is not finite"),
]
CASES = [
    *(("fused_client", *case) for case in (*SAMPLING, *DIALLING)),
    *(("draft", *case) for case in (*SAMPLING, *DIALLING, *LOADING)),
    ("draft", ("--reconnect_timeout_s", "-1"), "reconnect_timeout_s -1.0 is below 0"),
    ("draft", ("--serve", "99999"), "port 99999 is outside 0..65535"),
    *(("verify_target", *case) for case in (*SAMPLING, *LOADING)),
    *(("target", *case) for case in (*LOADING, *SERVING)),
    ("target", ("--port", "-1"), "port -1 is outside 0..65535"),
    ("target", ("--idle_timeout_s", "0"), "idle_timeout_s 0.0 is not above 0"),
]


@pytest.mark.parametrize(
    ("role", "flags", "message"), CASES, ids=[f"{role} {' '.join(flags)}" for role, flags, _ in CASES]
)
def test_a_bad_value_is_named_with_its_limit(
    role: str, flags: tuple[str, ...], message: str, models: ModelDirectories, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value out of range is refused at the start; the error has the limit.

    Regression: `fused_client`, which loads no model, sent some of these values to the server, and --batch 0 waited
    for ever.
    """
    model = [] if role == "fused_client" else ["--model", str(models.target)]
    prompt = [] if role == "target" else ["--prompt", "x"]
    usage_error("--role", role, *model, *prompt, *flags)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == f"error: {message}"


@pytest.mark.parametrize("role", ["fused_target", "verify_fused"])
@pytest.mark.parametrize("flags", [("--target_model", "mine"), ("--draft_model", "none")])
def test_no_draft_is_taken_for_another_target(
    role: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Users who name their own target must name a draft too, since the bundled draft fits only the bundled target.

    Regression: the bundled draft was used without a word, and the error was about vocabularies.
    """
    usage_error("--role", role, *flags)
    report = capsys.readouterr().err
    assert all(way in report for way in ("--draft_model DIR", "--draft_model ngram", "role target")), report
    assert "vocabulary" not in report


SERVER = ("--role", "fused_target", "--draft_model", "/nowhere", "--http_port", "0")
TARGET, DRAFT = (("--role", role, "--model", "/nowhere") for role in ("target", "draft"))
CLIENT = ("--role", "fused_client")
FAULTS: list[tuple[tuple[str, ...], str]] = [
    # Such values were an OverflowError's traceback after both models were loaded.
    ((*SERVER, "--max_body_mib", "inf"), "error: max_body_mib inf is not finite\n"),
    ((*SERVER, "--max_body_mib", "nan"), "error: max_body_mib nan is not above 0\n"),
    ((*SERVER, "--max_body_mib", "0"), "error: max_body_mib 0.0 is not above 0\n"),
    ((*SERVER, "--metrics_port", "70000"), "error: metrics_port 70000 is outside 0..65535\n"),
    ((*SERVER, "--metrics_port", "-1"), "error: metrics_port -1 is outside 0..65535\n"),
    ((*SERVER, "--http_port", "70000"), "error: http_port 70000 is outside 0..65535\n"),
    # Without --http_port or --serve such values passed; the fault showed once the part was turned on.
    ((*TARGET, "--max_body_mib", "0"), "error: max_body_mib 0.0 is not above 0\n"),
    ((*DRAFT, "--prompt", "x", "--max_body_mib", "0"), "error: max_body_mib 0.0 is not above 0\n"),
    ((*DRAFT, "--prompt", "x", "--probe_port", "70000"), "error: probe_port 70000 is outside 0..65535\n"),
    # A byte such as $'\xff' of the command line reached protobuf, and ended in an ExceptionGroup's traceback.
    ((*CLIENT, "--prompt", "a\udcff"), "error: prompt: character 1 is not valid UTF-8\n"),
    ((*CLIENT, "--prompt", "x", "--stop", "a\udcff"), "error: stop: character 1 is not valid UTF-8\n"),
    ((*CLIENT, "--prompt", "x", "--format", "xml"), "--format: invalid choice"),
    ((*CLIENT, "--prompt", "x", "--log_level", "loud"), "--log_level: invalid choice"),
    ((*CLIENT, "--prompt", "x", "--prompt_text", "y"), "not allowed with"),
]


@pytest.mark.parametrize(("arguments", "fault"), FAULTS)
def test_what_cannot_be_used_is_refused_before_a_model_loads(
    arguments: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usage_error(*arguments)
    report = capsys.readouterr().err
    assert report == fault if fault.endswith("\n") else fault in report


def test_a_flag_without_effect_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """A flag that has no effect gets one warning in the log.

    Regression: the warning came twice, for the target and for the draft.
    """
    fused_config(settings_of("fused_target", ["--tp_degree", "3"]))
    assert [record.getMessage() for record in caplog.records if "tp_degree 3 has no effect" in record.getMessage()] == [
        "tp_degree 3 has no effect: backend auto does not shard a model"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "has no prompt"),
        (b"\n  \n\t\n", "has no prompt"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["missing", "empty", "blank", "not UTF-8"],
)
def test_prompt_files_that_cannot_be_used(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    usage_error("--role", "fused_client", "--prompt_text", file)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: prompt file {file} {message}")
    assert len(captured.err.strip().splitlines()) == 1
