"""A rolling restart in small: `make bench` has it with three processes and twenty rounds."""

from pathlib import Path

import yaml

from benchmarks.rolling import Fleet, roll
from tests.e2e.conftest import JSON


def test_a_rolling_restart_loses_no_request_of_clients_that_keep_their_connections(tiny: JSON, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny))
    fleet = Fleet(file, Path(tiny["compile"]["artifacts"]), processes=2)
    before = [member.port for member in fleet.members]

    clients = roll(fleet, rounds=1)

    assert not {member.port for member in fleet.members} & {*before}
    assert [failure for client in clients for failure in client.failures] == []
    assert all(client.answered > 20 for client in clients)
    assert sum(client.reused for client in clients) > 0.8 * sum(client.answered for client in clients)
