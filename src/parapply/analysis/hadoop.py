"""Files by Hadoop's names: file:, hdfs:, s3a: and whatever else the cluster knows. Small files only; data is Spark's.

In go texts like ``hdfs:///logs`` or a local path; a path without a scheme is on Hadoop's default file system, which on
one machine is the local disk. Raises what Java raises: `job` turns it into one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from parapply.analysis.storage import StoredFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class HadoopStorage:
    """Hadoop's file systems through the session's JVM."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self._jvm: Any = spark._jvm  # noqa: SLF001  PySpark has no public way to Hadoop's file systems
        self._configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001

    def qualified(self, text: str) -> str:
        """Return a path with its scheme, for example ``file:/logs``."""
        path = self._path(text)
        return str(path.getFileSystem(self._configuration).makeQualified(path).toString())

    def raw_path(self, text: str) -> str:
        """Return the path without scheme and host, with the escapes of a URI."""
        return str(self._path(self.qualified(text)).toUri().getRawPath())

    def is_folder(self, text: str) -> bool:
        """Return whether a folder of this name exists."""
        path = self._path(text)
        system = path.getFileSystem(self._configuration)
        return bool(system.exists(path)) and bool(system.getFileStatus(path).isDirectory())

    def files(self, folder: str, suffix: str | tuple[str, ...] = "") -> list[StoredFile]:
        """Return the files below a folder, at any depth, whose name ends so, sorted; none if it does not exist."""
        path = self._path(folder)
        system = path.getFileSystem(self._configuration)
        if not system.exists(path):
            return []
        root = self.raw_path(folder).rstrip("/") + "/"
        found = []
        folders = [path]
        # Not listFiles(): it asks for permissions, too, and on a local disk that is a program started for each file.
        while folders:
            for status in system.listStatus(folders.pop()):
                if status.isDirectory():
                    folders.append(status.getPath())
                    continue
                name = str(status.getPath().toUri().getRawPath()).removeprefix(root)
                if name.endswith(suffix):
                    found.append(StoredFile(name=name, path=str(status.getPath()), size_bytes=int(status.getLen())))
        return sorted(found, key=lambda file: file.name)

    def why_unreadable(self, text: str) -> str:
        """Return why a file cannot be read, as the file system says it; empty if it can."""
        path = self._path(text)
        try:
            if path.toUri().getScheme() == "file":
                # Java's own error for a file that it may not read is that there is none.
                with Path(path.toUri().getPath()).open("rb"):
                    return ""
            path.getFileSystem(self._configuration).open(path).close()
        except OSError as error:
            return error.strerror or type(error).__name__
        except Py4JJavaError as error:
            return str(error.java_exception.toString()).partition(": ")[2].splitlines()[0]
        return ""

    def why_no_gzip(self, text: str) -> str:
        """Return why a file cannot be unpacked, after reading all of it; empty if it can."""
        path = self._path(text)
        stream = path.getFileSystem(self._configuration).open(path)
        try:
            self._jvm.org.apache.commons.io.IOUtils.consume(self._jvm.java.util.zip.GZIPInputStream(stream))
        except Py4JJavaError as error:
            return str(error.java_exception.toString()).rpartition(": ")[2]
        finally:
            stream.close()
        return ""

    def read_text(self, text: str) -> str:
        """Return a small file in UTF-8."""
        path = self._path(text)
        stream = path.getFileSystem(self._configuration).open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def write(self, text: str, content: bytes, *, is_new: bool = False) -> bool:
        """As `Storage.write`."""
        path, part = self._path(text), self._path(f"{text}.part")
        system = path.getFileSystem(self._configuration)
        stream = system.create(part, True)
        try:
            stream.write(content)
        finally:
            stream.close()
        if system.exists(path):
            if is_new:
                system.delete(part, False)
                return False
            # Not every file system renames onto an existing file.
            system.delete(path, False)
        return bool(system.rename(part, path))

    def remove(self, text: str) -> None:
        """Remove a file or a folder with all in it; nothing happens if it does not exist."""
        path = self._path(text)
        path.getFileSystem(self._configuration).delete(path, True)

    def folders(self, pattern: str) -> list[str]:
        """Return the folders that a pattern with ``*`` names."""
        path = self._path(pattern)
        found = path.getFileSystem(self._configuration).globStatus(path)
        return [str(status.getPath()) for status in found or () if status.isDirectory()]

    def _path(self, text: str) -> Any:  # noqa: ANN401  a Java object
        return self._jvm.org.apache.hadoop.fs.Path(text)
