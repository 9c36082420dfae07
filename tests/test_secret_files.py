"""Files with secrets are read if no other user has access, and again when they change."""

import os
import threading

import pytest

from persia.errors import ConfigError
from persia.secret_files import SecretFile


def secret(path):
    return SecretFile(path, "The secrets", "Write some.")


def test_a_file_has_changed_until_it_is_read_again(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    file = secret(path)
    assert file.text() == ""
    assert not file.changed()
    path.write_text("a")
    assert file.changed()
    assert file.text() == "a"
    assert not file.changed()
    path.unlink()
    assert not file.changed()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_other_users_may_have_no_access(tmp_path, mode):
    path = tmp_path / "file"
    path.touch(0o600)
    path.chmod(mode)
    file = secret(path)
    for read in (file.text, file.check):
        with pytest.raises(
            ConfigError, match=f"The secrets {path} are open to other users .mode {mode:04o}.*chmod 600"
        ):
            read()
    path.chmod(0o600)
    file.check()
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file.* Write some\."):
        file.check()


def test_a_pipe_is_read_once(tmp_path):
    """For example of a shell: `--key-file <(decrypt keys)`."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    writer = threading.Thread(target=path.write_text, args=("a",))
    writer.start()
    file = secret(path)
    assert file.text() == "a"
    writer.join()
    os.utime(path, ns=(1, 1))
    assert not file.changed()
