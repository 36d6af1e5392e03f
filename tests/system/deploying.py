"""A deployment of Flower on loopback: certificates, keys, and processes that are ended by their ids."""

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
TICKS = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_certificates(folder):
    """An authority, and the superlink's certificate from it."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name, key, issuer, signer, authority):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject)
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(hours=1))
        made = made.not_valid_after(now + datetime.timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(authority, None), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        issued = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        made = made.add_extension(issued, critical=False)
        usage = dict.fromkeys(
            ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
        )
        usage |= {"digital_signature": True, "key_encipherment": False}
        usage |= {"key_cert_sign": authority, "crl_sign": authority}
        made = made.add_extension(x509.KeyUsage(**usage), critical=True)
        if not authority:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(signer, hashes.SHA256())

    root, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = certificate("authority", root, None, root, True)
    server = certificate("superlink", own, ca.subject, root, False)
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(pem(own))


def make_key(folder, name):
    """A node's pair of keys, as `ssh-keygen -t ecdsa -b 384` makes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (folder / name).write_bytes(private)
    (folder / name).chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)


class Deployment:
    """A superlink with TLS and node authentication, and supernodes; leaving it ends every process it started."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.processes = {}
        self.certify()
        own = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        own |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        own |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}
        self.environment = os.environ | own

    def certify(self):
        """Make the certificates, and tell flwr where the superlink is."""
        make_certificates(self.folder)
        (self.folder / "config.toml").write_text(
            f'[superlink.loop]\naddress = "{HOST}:{self.port}"\nroot-certificates = "{self.folder / "ca.crt"}"\n'
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.end(name)

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command[0], *map(str, command[1:])],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def end(self, name, how=signal.SIGKILL):
        """End a process and those that it started: they are a group of its id."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=20)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def superlink(self):
        tls = [f"--ssl-{kind}={self.folder / file}" for kind, file in TLS.items()]
        command = ["flower-superlink", *tls, "--enable-supernode-auth", "--host", HOST, "--port", self.port]
        command += ["--database", self.folder / "state.db", "--disable-runtime-dependency-installation"]
        self.start("superlink", *command, "--isolation", "process")
        self.wait_for(lambda: listens(self.port), "the superlink listens")

    def superexec(self):
        address = ["--runtime-api-address", f"{HOST}:{self.port}", "--root-certificates", self.folder / "ca.crt"]
        self.start("superexec", "flower-superexec", *address)

    def supernode(self, name, partition, *, registered=True, also="", program=("flower-supernode",)):
        make_key(self.folder, name)
        if registered:
            self.flwr("supernode", "register", self.folder / f"{name}.pub", "loop")
        command = [*program, "--superlink", f"{HOST}:{self.port}", "--root-certificates", self.folder / "ca.crt"]
        command += ["--auth-supernode-private-key", self.folder / name]
        command += [] if program == TREE else ["--port", free_port()]
        self.start(name, *command, "--node-config", f"partition-id={partition} {also}".strip())

    def nodes(self, count, pause):
        """Many supernodes in one tree of processes, all registered."""
        keys = [f"node{number}" for number in range(count)]
        for name in keys:
            make_key(self.folder, name)
        self.check("python", "-c", REGISTER, *(self.folder / f"{name}.pub" for name in keys))
        command = ["python", "-m", "secateur.federated.flower.nodes", count, "--pause", pause]
        command += ["--superlink", f"{HOST}:{self.port}", "--root-certificates", self.folder / "ca.crt"]
        command += ["--auth-supernode-private-key", self.folder / "node{n}"]
        self.start("nodes", *command, "--node-config", "partition-id={n}")

    def flwr(self, *arguments):
        return self.check("flwr", *arguments)

    def check(self, command, *arguments):
        done = subprocess.run(
            [BIN / command, *map(str, arguments)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app, **config):
        told = " ".join(f"{name.replace('_', '-')}={value!r}".replace("'", '"') for name, value in config.items())
        return self.flwr("run", app, "loop", "--run-config", told)

    def said(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, found, what, seconds=300):
        end = time.monotonic() + seconds
        while not (value := found()):
            if time.monotonic() > end:
                logs = "\n".join(f"--- {name}\n{self.said(name)[-3000:]}" for name in LOGS)
                raise AssertionError(f"waited {seconds} s in vain: {what}\n{logs}")
            time.sleep(0.2)
        return value


# `flwr supernode register` for many keys in one process, which imports once
REGISTER = "import sys; from flwr.cli.app import app\nfor key in sys.argv[1:]:\n"
REGISTER += "    app(['supernode', 'register', key, 'loop'], standalone_mode=False)"
TREE = ("python", "-m", "secateur.federated.flower.nodes", 1, "--pause", 0.3)  # a node that imports torch once
TLS = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
LOGS = ("superlink", "superexec", "first", "second", "hospital-0", "hospital-1", "nodes")


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def processes(group):
    """The processes of a group, as folders of /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append(folder)
        except ProcessLookupError:
            continue
    return found


def cost(group):
    """CPU seconds of a group with those that ended in it, and the sum of its processes' highest memory in MiB."""
    seconds = memory = 0.0
    for folder in processes(group):
        try:
            times = (folder / "stat").read_text().rpartition(")")[2].split()[11:15]  # own, and of ended children
            status = (folder / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds += sum(map(int, times)) / TICKS
        memory += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0) / 1024
    return seconds, memory


def held(group):
    """Memory in MiB that the processes of a group hold, in which shared pages count once."""
    shares = 0
    for folder in processes(group):
        lines = (folder / "smaps_rollup").read_text().splitlines()
        shares += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return shares / 1024
