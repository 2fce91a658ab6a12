# Makes the export of an NBD server a block device of this machine, over two connections, until the server ends.
import fcntl, os, socket, struct, sys

SET_SOCK, SET_BLOCK_BYTES, DO_IT, SET_BLOCKS = 0xAB00, 0xAB01, 0xAB03, 0xAB07
SET_TIMEOUT, SET_FLAGS = 0xAB09, 0xAB0A
BLOCK_BYTES = 4096


def connect(path):
    """Connects as old clients do; returns the socket, and the export's size and flags."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    assert stream.recv(18, socket.MSG_WAITALL)[:16] == b"NBDMAGICIHAVEOPT"
    stream.sendall(struct.pack(">L8sLL", 3, b"IHAVEOPT", 1, 0))
    return stream, *struct.unpack(">QH", stream.recv(10, socket.MSG_WAITALL))


path, name = sys.argv[1:]
connections = [connect(path), connect(path)]
_, size, flags = connections[0]
device = os.open(name, os.O_RDWR)
fcntl.ioctl(device, SET_BLOCK_BYTES, BLOCK_BYTES)
fcntl.ioctl(device, SET_BLOCKS, size // BLOCK_BYTES)
fcntl.ioctl(device, SET_FLAGS, flags)
# Seconds until a request that was on its way when the server ended has failed; otherwise 30.
fcntl.ioctl(device, SET_TIMEOUT, 8)
for stream, _, _ in connections:
    fcntl.ioctl(device, SET_SOCK, stream.fileno())
try:
    fcntl.ioctl(device, DO_IT)
except OSError as error:
    print(error, file=sys.stderr)
