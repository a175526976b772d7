"""
A Hub in memory on loopback for the real client: models and datasets, with commits, branches and pull requests.

    python tests/loopback_hub.py        prints its URL and serves until it is stopped

The owner's token allows everything, the reader's token allows reading public repositories. A repository named
`no-space` refuses commits. The client needs these environment variables before it is imported: HF_ENDPOINT, HF_TOKEN,
HF_HUB_DISABLE_XET=1 and a separate HF_HOME.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit


OWNER_TOKEN = "hf_ownerOwnerOwnerOwnerOwnerOwner"
READER_TOKEN = "hf_readerReaderReaderReaderReader"
OWNER = "tester"
LARGE_FILES = (".safetensors", ".png")
DATE = "2026-01-01T00:00:00.000Z"


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str):
        self.status, self.message = status, message or code
        self.headers = {"X-Error-Code": code, "X-Error-Message": self.message, **headers}


class Repository:
    """A repository whose commits are dicts from path to bytes, found by branch, pull request or hash."""

    def __init__(self, name: str, private: bool):
        self.name = name
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.commit("main", {})

    def commit(self, ref: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"commit {len(self.commits)} on {ref} of {self.name}".encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def sha_of(self, revision: str) -> str:
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


def is_large(path: str) -> bool:
    return path.endswith(LARGE_FILES)


def file_id(path: str, content: bytes) -> str:
    """Return the Hub's oid of a file: git's hash, or the SHA-256 of a large file."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entries_of(files: dict[str, bytes]) -> list[dict]:
    """Return the entries of a commit: its files and their folders."""
    folders = sorted({str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."})
    return [{"type": "directory", "path": path, "oid": file_id("", path.encode()), "size": 0} for path in folders] + [
        {"type": "file", "path": path, "oid": file_id(path, content), "size": len(content)}
        for path, content in files.items()
    ]


ROUTES = []


def route(method: str, pattern: str):
    """
    Register a function of the handler for a method and path. `{repo}` matches the id of a model or dataset, other
    names match anything.
    """
    pattern = pattern.replace("{kind}", "(?:models|datasets)")
    pattern = re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{'[^/]+/[^/]+' if m[1] == 'repo' else '.+'})", pattern)

    def register(function):
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Repository] = {}
    large_files: dict[str, bytes] = {}
    lock = Lock()

    def log_message(self, *args):
        pass

    def answer(self):
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self._read_body()
        method = "GET" if self.command == "HEAD" else self.command
        try:
            with self.lock:
                for known_method, pattern, function in ROUTES:
                    if known_method == method and (match := pattern.fullmatch(url.path)):
                        return function(
                            self, **{name: unquote(text) for name, text in match.groupdict().items() if text}
                        )
            raise Refusal(404, "EntryNotFound", f"no route {self.command} {url.path}")
        except Refusal as refusal:
            self.reply({"error": refusal.message}, refusal.status, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, content, status: int = 200, headers: dict[str, str] | None = None):
        is_json = not isinstance(content, bytes)
        content = json.dumps(content).encode() if is_json else content
        self.send_response(status)
        kind = "application/json" if is_json else "application/octet-stream"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def address(self) -> str:
        return "http://{}:{}".format(*self.server.server_address)

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def repository(self, repo: str, write: bool = False) -> Repository:
        repository = self.repositories.get(repo)
        if repository is None or (repository.private and self.token != OWNER_TOKEN):
            raise Refusal(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if write:
            self.check_owner()
        return repository

    def check_owner(self):
        if not self.token:
            raise Refusal(401, "", "Invalid username or password.")
        if self.token != OWNER_TOKEN:
            raise Refusal(403, "", "Forbidden: you don't have the right to write here")

    # The protocol, in the order of a push and a load.

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        names = {OWNER_TOKEN: OWNER, READER_TOKEN: "reader"}
        if self.token not in names:
            raise Refusal(401, "", "Invalid user token.")
        self.reply({"type": "user", "name": names[self.token], "orgs": []})

    @route("POST", "/api/repos/create")
    def create(self):
        self.check_owner()
        request = json.loads(self.body)
        repo = f"{request.get('organization') or OWNER}/{request['name']}"
        url = f"{self.address}/{repo}"
        if repo in self.repositories:
            return self.reply({"error": "You already created this model repo", "url": url}, 409)
        self.repositories[repo] = Repository(
            repo, bool(request.get("private") or request.get("visibility") == "private")
        )
        self.reply({"url": url, "name": repo, "id": "1"})

    @route("GET", "/api/{kind}/{repo}/auth-check/write")
    def auth_check(self, repo):
        self.repository(repo, write=True)
        self.reply({})

    @route("POST", "/api/{kind}/{repo}/branch/{branch}")
    def create_branch(self, repo, branch):
        repository = self.repository(repo, write=True)
        if branch in repository.refs:
            raise Refusal(409, "", "Reference already exists")
        repository.refs[branch] = repository.sha_of("main")
        self.reply({})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        self.reply({"errors": [], "warnings": []})

    @route("POST", "/api/{kind}/{repo}/preupload/{revision}")
    def preupload(self, repo, revision):
        repository = self.repository(repo, write=True)
        files = repository.commits[repository.sha_of(revision)]
        answers = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            oid = file_id(path, files[path]) if path in files else None
            mode = "lfs" if is_large(path) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply({"files": answers})

    @route("POST", r"(/datasets)?/{repo}\.git/info/lfs/objects/batch")
    def large_file_batch(self, repo):
        self.repository(repo, write=True)
        objects = [{"oid": o["oid"], "size": o["size"]} for o in json.loads(self.body)["objects"]]
        for o in objects:
            if o["oid"] not in self.large_files:
                o["actions"] = {"upload": {"href": f"{self.address}/large/{o['oid']}"}}
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        self.reply({"transfer": "basic", "objects": objects}, headers=headers)

    @route("PUT", "/large/{oid}")
    def large_file(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "", "the content has another hash")
        self.large_files[oid] = self.body
        self.reply({})

    @route("POST", "/api/{kind}/{repo}/commit/{revision}")
    def commit(self, repo, revision):
        repository = self.repository(repo, write=True)
        if repo.endswith("/no-space"):
            raise Refusal(403, "", "Storage limit reached")
        files = dict(repository.commits[repository.sha_of(revision)])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.large_files[value["oid"]]
        answer = {"success": True, "hookOutput": ""}
        if self.query.get("create_pr") == ["1"]:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.address}/{repo}/discussions/{number}"
        sha = repository.commit(revision, files)
        self.reply({**answer, "commitOid": sha, "commitUrl": f"{self.address}/{repo}/commit/{sha}"})

    @route("GET", r"/api/{kind}/{repo}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
    def tree(self, repo, revision, folder=""):
        repository = self.repository(repo)
        entries = entries_of(repository.commits[repository.sha_of(revision)])
        inside = [entry for entry in entries if entry["path"].startswith(f"{folder}/" if folder else "")]
        if self.query.get("recursive", ["false"])[0].lower() != "true":
            inside = [entry for entry in inside if "/" not in entry["path"][len(folder) :].strip("/")]
        self.reply(inside)

    @route("POST", "/api/{kind}/{repo}/paths-info/{revision}")
    def paths_info(self, repo, revision):
        repository = self.repository(repo)
        paths = parse_qs(self.body.decode())["paths"]
        entries = entries_of(repository.commits[repository.sha_of(revision)])
        self.reply([entry for entry in entries if entry["path"] in paths])

    @route("GET", "/api/{kind}/{repo}/revision/{revision}")
    def revision(self, repo, revision):
        repository = self.repository(repo)
        sha = repository.sha_of(revision)
        siblings = [{"rfilename": path} for path in repository.commits[sha]]
        about = {"id": repo, "sha": sha, "private": repository.private, "siblings": siblings}
        self.reply({**about, "tags": [], "downloads": 0, "likes": 0, "createdAt": DATE, "lastModified": DATE})

    @route("GET", "/api/{kind}/([^/]+/[^/]+)")
    def model(self):
        self.revision(repo="/".join(self.path.split("?")[0].split("/")[3:5]), revision="main")

    @route("GET", r"(/datasets)?/{repo}/resolve/(?P<revision>refs%2Fpr%2F\d+|refs/pr/\d+|[^/]+)/{path}")
    def resolve(self, repo, revision, path):
        repository = self.repository(repo)
        sha = repository.sha_of(revision)
        if path not in repository.commits[sha]:
            # With the commit, the client remembers in its cache that the file does not exist.
            raise Refusal(404, "EntryNotFound", f"{path} is not in {repo}", **{"X-Repo-Commit": sha})
        content = repository.commits[sha][path]
        about = {"X-Repo-Commit": sha, "ETag": f'"{file_id(path, content)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self.reply(content, headers=about)
        first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.reply(content[first : last + 1], status=206, headers=about)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print("http://{}:{}".format(*server.server_address), flush=True)
    server.serve_forever()
