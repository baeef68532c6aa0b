"""`dsv4 demo`: the checkpoint that comes along."""

from pathlib import Path

from dsv4.commands import demo


def test_it_generates_from_the_demo_checkpoint(command_line):
    code, out, _ = command_line("demo", "--max-new-tokens", "2")
    assert code == 0 and "Paris" in out


def test_where_prints_the_directory_alone(command_line):
    code, out, err = command_line("demo", "--where")
    assert (code, err) == (0, "") and (Path(out.strip()) / "config.json").is_file()


def test_a_wheel_comes_before_a_checkout(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "INSIDE", tmp_path)
    assert demo.checkpoint() == tmp_path


def test_without_a_checkpoint_it_is_one_line(command_line, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "INSIDE", tmp_path / "a")
    monkeypatch.setattr(demo, "BESIDE", tmp_path / "b")
    code, out, err = command_line("demo")
    assert (code, out, err.count("\n")) == (2, "", 1) and "demo checkpoint" in err and "Traceback" not in err
