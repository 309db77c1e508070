"""Converts what Azure Notification Hubs exports to CSV for `tokenkeeperd import`.

    notification_hubs.py registrations Output.txt > devices.csv    (a job ExportRegistrations)
    notification_hubs.py feedback 07272016 > feedback.csv          (blobs of the PNS feedback container; import --feedback)

Leaves out other platforms, and errors that say nothing about a token. An element that is malformed costs itself, and is reported.
"""
import csv
import re
import sys
import xml.etree.ElementTree as ElementTree

REASONS = {"ExpiredChannel": "Unregistered", "BadChannel": "BadDeviceToken"}


def elements(file, name):
    """The elements, one after the other, on one line or several."""
    opening = re.compile(rf"<{name}[\s>]")
    lines, first = [], 0
    for number, line in enumerate(file, 1):
        if opening.match(line) and lines:
            # The one before was not closed.
            yield first, "".join(lines)
            lines = []
        if line.strip() or lines:
            first = first if lines else number
            lines.append(line)
        if f"</{name}>" in line:
            yield first, "".join(lines)
            lines = []
    if lines:
        yield first, "".join(lines)


def registration(fields, attributes):
    if not attributes.get("type", "").startswith("Apple"):
        return None
    tags = [tag.strip() for tag in (fields.get("Tags") or "").split(",") if tag.strip()]
    known = {}
    for tag in tags:
        match = re.fullmatch(r"\$(InstallationId|UserId):\{(.*)\}", tag)
        if match:
            known[match[1]] = match[2]
    plain = [tag for tag in tags if not re.fullmatch(r"\$(InstallationId|UserId):\{(.*)\}", tag)]
    return [fields.get("DeviceToken"), known.get("InstallationId"), known.get("UserId"), ",".join(plain)]


def feedback(fields, _):
    reason = REASONS.get(fields.get("NotificationSystemError"))
    if (fields.get("Platform") or "").lower() not in ("apple", "apns") or reason is None:
        return None
    return [fields.get("PnsHandle"), fields.get("FeedbackTime"), reason]


KINDS = {
    "registrations": ("RegistrationDescription", registration, ["token", "device_id", "user_id", "tags"]),
    "feedback": ("PnsFeedback", feedback, ["token", "timestamp", "reason"]),
}


def main(kind, path):
    name, row, header = KINDS[kind]
    output = csv.writer(sys.stdout, lineterminator="\n")
    output.writerow(header)
    counts = {"converted": 0, "left out": 0, "malformed": 0}
    with open(path, encoding="utf-8-sig") as file:
        for line, text in elements(file, name):
            try:
                element = ElementTree.fromstring(text)
            except ElementTree.ParseError as error:
                counts["malformed"] += 1
                print(f"line {line}: {error}", file=sys.stderr)
                continue
            local = lambda tag: tag.rsplit("}", 1)[-1]
            found = row(
                {local(child.tag): child.text for child in element},
                {local(key): value for key, value in element.attrib.items()})
            counts["converted" if found else "left out"] += 1
            if found:
                output.writerow(found)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), file=sys.stderr)
    return 1 if counts["malformed"] else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
