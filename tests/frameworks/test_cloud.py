"""`ParquetStream` over S3 and GCS, as servers on this machine have them, of packages that `make test-full` installs."""

import itertools
import logging
import socket

import pyarrow as pa
import pytest
import torch
from pyarrow import fs, parquet
from torch.utils.data import DataLoader as TorchDataLoader

from rayloader import DataLoader, ParquetStream, ShuffleBuffer

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the servers' packages warn of is their own matter
]
ROWS = 300
HERE = "127.0.0.1"


def s3():
    """A server that has been started, and the URI of a path in it."""
    moto = pytest.importorskip("moto.server", reason="there is no server of S3: pip install moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(HERE, 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    options = f"endpoint_override={HERE}%3A{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    return server, f"s3://name:secret@{{}}?{options}"


def gcs():
    """The same."""
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="there is no server of GCS: pip install gcp-storage-emulator"
    )
    with socket.create_server((HERE, 0)) as free:
        _, port = free.getsockname()
    server = emulator.create_server(HERE, port, in_memory=True)
    server.start()
    # After the seconds of the limit, what the server does not know is an error.
    options = f"endpoint_override={HERE}%3A{port}&scheme=http&project_id=p&retry_limit_seconds=30"
    return server, f"gs://anonymous@{{}}?{options}"


@pytest.fixture(scope="module", params=[s3, gcs], ids=["S3", "GCS"])
def uri(request):
    """That of a path in a server with three files of five row groups each."""
    server, uri = request.param()
    try:
        filesystem, bucket = fs.FileSystem.from_uri(uri.format("bucket"))
        filesystem.create_dir(bucket)
        for number in range(3):
            table = pa.table({"i": range(100 * number, 100 * number + 100)})
            parquet.write_table(table, f"{bucket}/data/{number}.parquet", row_group_size=20, filesystem=filesystem)
        yield uri
    finally:
        server.stop()


def numbers(batches):
    return [batch["i"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", ["fork", "ray"])
def test_a_uri_is_read_and_an_epoch_continued(uri, workers):
    def stream():
        torch.manual_seed(3)
        return ShuffleBuffer(ParquetStream(uri.format("bucket/data"), shuffle=True), 10)

    options = {"num_workers": 2, "workers": workers}
    loader = DataLoader(stream(), 16, **options)
    iterator = iter(loader)
    head = numbers(itertools.islice(iterator, 4))
    state = loader.state_dict()
    rest = numbers(iterator)
    assert sorted(itertools.chain(*head, *rest)) == list(range(ROWS))
    assert head + rest == numbers(TorchDataLoader(stream(), 16, num_workers=2, multiprocessing_context="fork"))
    resumed = DataLoader(stream(), 16, **options)
    resumed.load_state_dict(state)
    assert numbers(resumed) == rest
