"""A measurement as strict JSON, described by a file of probes/schema/."""

from dataclasses import dataclass
from pathlib import Path

from dsv4.probes.measure.base.text import Text
from dsv4.probes.report import schema
from dsv4.probes.report.json_report import strict
from dsv4.probes.report.provenance import provenance
from dsv4.probes.subject import Subject

SCHEMAS = Path(__file__).resolve().parents[2] / "schema"


@dataclass(frozen=True)
class Kind:
    """name: of the measurement, by which its schema is called; title: before the checkpoint's name; seeded: what the
    seed decides; revision: of the version, '.1' where documents have more than those of the version had first."""

    name: str
    title: str
    seeded: str
    version: str = "1"
    revision: str = ""

    @property
    def schema(self) -> Path:
        return SCHEMAS / f"{self.name}-{self.version}.json"

    def valid(self, document: dict) -> dict:
        """`document` itself. Raises Dsv4Error with the first thing that contradicts the schema."""
        wrong = f"the measurement is no valid {self.name}-{self.version} document"
        return schema.valid(document, self.schema, wrong)

    def document(
        self,
        subject: Subject,
        settings: dict,
        text: Text | list[Text] | dict,
        figures: dict,
        command: list[str],
        started: float,
    ) -> dict:
        """The valid document: the head that all have, `figures`, and the seconds since `started` (`time.time()`).
        settings: of `Settings.about`; text: one, several, or what the document says of it."""
        about = provenance(subject, command, {self.seeded: settings["seed"]}, started)
        if isinstance(text, list):
            texts = {"texts": [t.about() for t in text]}
        else:
            texts = {"text": text if isinstance(text, dict) else text.about()}
        head = {
            "schema_version": self.version + self.revision,
            "title": f"{self.title} {about['checkpoint']['name']}, {about['subject']}",
            "provenance": about,
        }
        seconds = {"seconds": about["seconds"]}
        return self.valid(strict(head | texts | {"settings": settings} | figures | seconds))
