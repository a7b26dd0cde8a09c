"""autopar/cli.py, cli_arguments.py and demo.py: what each command prints, where, and its exit status."""

import json
import re
import subprocess
import sys

import pytest

import autopar
from autopar import api, cli, demo
from autopar.cli import main
from autopar.cli_arguments import parse_pins
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan import Plan
from autopar.runtime import launch
from tests.example_plan import plan_data


@pytest.fixture
def calls(monkeypatch):
    """`api.plan` replaced by one that keeps what it was called with."""
    kept = []

    def plan(model, mesh, *, dump_dir=None, progress=None, **options):
        kept.append({"model": model, "mesh": mesh, **options})
        print("a library that prints")
        if dump_dir is not None:
            for name in ("02_after_normalize.txt", "01_after_capture.txt"):
                with open(f"{dump_dir}/{name}", "w") as file:
                    file.write(name)
        return Plan.from_dict(plan_data())

    monkeypatch.setattr(api, "plan", plan)
    return kept


def test_help_needs_no_torch():
    """The package's own __init__ stands aside: this is about the command line."""
    code = (
        "import sys, types; package = types.ModuleType('autopar'); package.__path__ = ['autopar'];"
        "package.__version__ = '0'; sys.modules['autopar'] = package;"
        "from autopar.cli import main; status = main(['plan', '--help']);"
        "assert status == 0; assert not {'torch', 'rich', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: autopar plan" in done.stdout


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name} ", shown, re.M) for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("tp=8,pp=2", {"tp": 8, "pp": 2}),
        ("sp=true,zero=0,schedule=1f1b", {"sp": True, "zero": 0, "schedule": "1f1b"}),
        ("*.up_proj.weight=tp:S(0,3)+dp:R, tp=2", {"*.up_proj.weight": {"tp": "S(0,3)", "dp": "R"}, "tp": 2}),
    ],
)
def test_pins(text, pins):
    assert parse_pins(text) == pins


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: command"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["plan"], "the following arguments are required: MODEL"),
        (["plan", "gpt-tiny", "--pin", "tp"], "'tp' is not of the form name=value"),
        (["plan", "gpt-tiny", "--pin", "tp=2,tp=4"], "'tp' is pinned twice"),
        (["plan", "gpt-tiny", "--pin", "tp=2", "--pin", "tp=4"], "'tp' is pinned twice"),
        (["plan", "gpt-tiny", "--mesh", "2x0"], "'2x0' is not of the form 4, 2x8 or 4x2x8"),
        (["plan", "gpt-tiny", "--batch", "0"], "'0' is not a positive integer"),
        (["plan", "gpt-tiny", "--optimizer", "adam"], "'adam' is none of adamw, sgd, none"),
        (["plan", "gpt-tyni"], "unknown model 'gpt-tyni': did you mean 'gpt-tiny'?"),
        (["plan", "gpt-tiny", "--seq", "4096"], "seq 4096 exceeds the 128 positions"),
        (["plan", "hf:/no/such/folder"], "there is no file"),
        (["dump", "gpt-tiny"], "the following arguments are required: --out"),
    ],
)
def test_bad_usage_is_2(capsys, argv, message):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1]
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "gpt-tiny", "-o", "{folder}/no/plan.json"], "{folder}/no is no folder"),
        (["plan", "gpt-tiny", "-o", "{folder}"], "it is a folder"),
        (["plan", "gpt-tiny", "-o", "{folder}/file/plan.json"], "{folder}/file is no folder"),
        (["export", "gpt-tiny", "-o", "{folder}/no/x.py"], "{folder}/no is no folder"),
        (["calibrate", "-o", "{folder}"], "it is a folder"),
        (["simulate", "{folder}/plan.json", "--timeline", "{folder}/no/x.json"], "{folder}/no is no folder"),
        (["dump", "gpt-tiny", "--out", "{folder}/file"], "{folder}/file is no folder"),
        (["dump", "gpt-tiny", "--out", "{folder}/file/a/b"], "{folder}/file is no folder"),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(monkeypatch, capsys, tmp_path, argv, message):
    for command in cli.COMMANDS:
        monkeypatch.setitem(cli.COMMANDS, command, lambda args: pytest.fail("it worked"))
    (tmp_path / "file").touch()
    assert main([a.format(folder=tmp_path) for a in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"autopar {argv[0]}: error: cannot write {tmp_path}")
    assert line.endswith(message.format(folder=tmp_path))


def test_a_file_that_may_not_be_written(monkeypatch, capsys, tmp_path, calls):
    """`os.access` stands in for a user that is not root."""
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    (tmp_path / "plan.json").write_text("kept")
    assert main(["plan", "gpt-tiny", "-o", str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err.rstrip().endswith("plan.json: it is not writable")
    assert main(["plan", "gpt-tiny", "-o", str(tmp_path / "new.json")]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"{tmp_path} is not writable")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert calls == []


def test_plan_prints_a_table_and_writes_the_file(calls, capsys, tmp_path):
    path = tmp_path / "plan.json"
    argv = ["plan", "gpt-tiny", "--mesh", "2x4", "--device", "a100-sxm-80gb", "--batch", "16", "--seq", "32"]
    argv += ["--precision", "bf16", "--memory", "70GiB", "--pin", "tp=4", "--pin", "sp=true", "-o", str(path)]
    assert main(argv) == 0
    assert "toy, 8.03B parameters" in capsys.readouterr().out
    assert Plan.load(path) == Plan.from_dict(plan_data())
    (call,) = calls
    assert (call["mesh"].shape, call["mesh"].device) == ((2, 4), "a100-sxm-80gb")
    assert [tuple(t.shape) for t in call["example_args"]] == [(16, 32)] * 2
    assert {k: call[k] for k in ("pin", "memory", "precision", "optimizer")} == {
        "pin": {"tp": 4, "sp": True},
        "memory": "70GiB",
        "precision": "bf16",
        "optimizer": "adamw",
    }
    assert all(p.is_meta for p in call["model"].parameters())


def test_json_is_all_that_stands_on_standard_output(calls, capsys):
    assert main(["plan", "gpt-tiny", "--mesh", "16", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == plan_data()
    assert "a library that prints" in err
    assert calls[0]["example_args"][0].shape[0] == 16, "a row for every device"


@pytest.mark.parametrize("error", [InfeasibleError("3 GiB\nare missing"), ValueError("3 GiB are missing")])
def test_an_error_is_one_line_and_1(monkeypatch, capsys, error):
    def plan(*args, **options):
        raise error

    monkeypatch.setattr(api, "plan", plan)
    assert main(["plan", "gpt-tiny", "--json"]) == 1
    assert capsys.readouterr() == ("", f"autopar: {type(error).__name__}: 3 GiB are missing\n")
    assert main(["plan", "gpt-tiny", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_show_prints_a_plan_again(capsys, tmp_path):
    Plan.from_dict(plan_data()).save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    table = capsys.readouterr().out
    assert "toy, 8.03B parameters" in table
    assert "ops by class" not in table
    assert main(["show", str(tmp_path / "plan.json"), "--ops"]) == 0
    assert "ops by class" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan_data()


def test_show_names_what_is_wrong_with_a_file(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data() | {"zero": 7}))
    assert main(["show", str(path)]) == 1
    assert capsys.readouterr() == ("", f"autopar: PlanError: {path}: zero: 7 is not an integer from 0 to 3\n")


def test_dump_lists_what_it_wrote(calls, capsys, tmp_path):
    (tmp_path / "old.txt").write_text("not ours")
    assert main(["dump", "gpt-tiny", "--out", str(tmp_path), "--json"]) == 0
    names = ["01_after_capture.txt", "02_after_normalize.txt"]
    assert json.loads(capsys.readouterr().out) == {"files": [str(tmp_path / n) for n in names]}


def test_models_lists_the_zoo(capsys):
    assert main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama3-405b"]["parameters"] == 405_853_388_800
    assert rows["gpt2"]["layers"] == 12
    assert main(["models"]) == 0
    assert re.search(r"llama3-8b +8\.03B +32 +4096", capsys.readouterr().out)


REPORT = {
    "equal": True,
    "world_size": 2,
    "dtype": "float64",
    "loss": [6.25, 6.25],
    "max_error": {"loss": 0.0, "outputs": None, "grads": 1e-15, "params_after_step": 2e-12, "buffers": 0.0},
    "worst": "layers.0.mlp.up_proj.weight",
    "plan": {"degrees": {"dp": 1, "tp": 2}, "zero": 0},
}


class _Report:
    def __init__(self, data):
        self.data = data

    def to_dict(self):
        return self.data


def test_verify_for_real(capsys):
    assert main(["verify", "gpt-tiny", "--mesh", "2", "--batch", "4", "--seq", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["equal"], report["world_size"], report["dtype"]) == (True, 2, "float64")
    assert report["max_error"]["grads"] <= 1e-9
    assert report["loss"][0] > 6  # log of the vocabulary: the untrained model knows nothing


@pytest.fixture
def verified(monkeypatch):
    """Ranks run here, one after the other; `verify` gives what is in the list, rank by rank."""
    kept = {"calls": [], "reports": []}

    def verify(model, mesh, **options):
        kept["calls"].append({"mesh": mesh, "model": model, **options})
        return _Report(kept["reports"][(len(kept["calls"]) - 1) % len(kept["reports"])])

    def run(path, world, payload, timeout_s, *, preload=()):
        assert path == "autopar.cli:verify_rank"
        return [json.loads(json.dumps(cli.verify_rank(json.loads(json.dumps(payload))))) for _ in range(world)]

    monkeypatch.setattr(autopar, "verify", verify)
    monkeypatch.setattr(launch, "run_ranks_local", run)
    return kept


def test_verify_prints_the_largest_errors(verified, capsys):
    verified["reports"] = [REPORT]
    argv = ["verify", "gpt-tiny", "--mesh", "2", "--seq", "16", "--steps", "3", "--dtype", "float32", "--pin", "tp=2"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert re.search(r"params after step +2\.00e-12", shown)
    assert "degrees" not in shown
    assert "tp 2" in shown
    assert shown.rstrip().endswith("\nequal")
    first, second = verified["calls"]
    assert (first["dtype"], first["steps"], first["pin"]) == ("float32", 3, {"tp": 2})
    assert tuple(first["example_args"][0].shape) == (8, 16)
    weights = [next(call["model"].parameters()) for call in (first, second)]
    assert weights[0].equal(weights[1]), "ranks start from the same weights"


def test_verify_fails_when_any_rank_differs(verified, capsys):
    different = REPORT | {"equal": False, "worst": "norm.weight"}
    verified["reports"] = [REPORT, different]
    assert main(["verify", "gpt-tiny", "--mesh", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == different


def test_verify_knows_bad_usage(verified, capsys):
    assert main(["verify", "gpt-tyni", "--mesh", "2"]) == 2
    assert "unknown model 'gpt-tyni'" in capsys.readouterr().err


def _run_demo(monkeypatch, equal):
    def run(*, on_event=None, **options):
        assert options == {"pin": {"tp": 2}, "steps": 2, "ranks": 2, "timeout_s": 600}
        steps = [{"step": i, "single": 6.25, "parallel": 6.25, "error": 0.0} for i in (1, 2)]
        for event in [{"plan": plan_data()}, *steps] if on_event else []:
            on_event(event)
        errors = {"loss": 1e-16, "params": 1e-12 if equal else 1e-3}
        return {"equal": equal, "bound": 1e-9, "max_error": errors, "steps": steps, "plan": plan_data()}

    monkeypatch.setattr(demo, "run", run)
    return main(["demo", "--pin", "tp=2", "--steps", "2", "--ranks", "2"])


def test_demo_shows_each_step_and_says_equal(monkeypatch, capsys):
    assert _run_demo(monkeypatch, equal=True) == 0
    shown = capsys.readouterr().out
    assert "toy, 8.03B parameters" in shown
    assert re.search(r"2 +6\.250000000000 +6\.250000000000 +0\.0e\+00", shown)
    assert shown.splitlines()[-1].startswith("equal to 1e-09 ")


def test_demo_that_differs_is_1(monkeypatch, capsys):
    assert _run_demo(monkeypatch, equal=False) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT equal to 1e-09 ")


def test_the_demo_for_real():
    """Two ranks train a model of their own plan; the launcher, the planner and the runtime are all real."""
    seen = []
    result = demo.run(steps=2, ranks=2, timeout_s=240, on_event=seen.append)
    assert result["equal"] is True
    assert [set(event) for event in seen] == [{"plan"}, *[{"step", "single", "parallel", "error"}] * 2]
    assert seen[1]["single"] != seen[2]["single"], "it trains"
    plan = Plan.from_dict(result["plan"])
    assert plan.mesh["shape"] == (2,)


def test_the_demo_tells_why_it_cannot_run():
    with pytest.raises(AutoparError, match=r"^rank [01]: pin nonsense"):
        demo.run(pin={"nonsense": 1}, steps=1, ranks=2, timeout_s=240)


def test_the_module_is_the_command(tmp_path):
    Plan.from_dict(plan_data()).save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "autopar", "show", str(tmp_path / "plan.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == plan_data()
