"""Each domain's entitlement in plain Python, read from its clauses alone: what the rules of policy.yaml are checked against.

`<domain>_owed(record)` takes a record's values (choices by key, dates as datetime.date); "rule 3" is the third clause as
numbered in the prompt.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def airline_owed(record: Record) -> bool:
    """14 CFR Part 260 as the clauses put it."""
    if record["credit"] == "accepted":  # rule 5, which outranks everything
        return False
    if record["decision"] in ("rebooked", "travelled"):  # rule 4
        return False
    hours = {"domestic": 3, "international": 6}[record["itinerary"]]
    retimed = max(record["departs_earlier"], record["arrives_later"]) >= 60 * hours  # rule 2
    changed = record["route"] != "as_booked" or not record["cabin_kept"]  # rule 3
    if record["airline_cancelled"] or retimed or changed:  # rule 1
        return True
    return record["ticket"] == "refundable" and record["decision"] in ("declined", "unanswered")  # rules 6, 8


def billing_owed(record: Record) -> bool:
    """12 CFR 1026.13 as the clauses put it."""
    error = record["ground"] in ("stranger", "payment", "sum", "unclear")  # rule 2; rule 4 leaves out "high" and "copy"
    if record["ground"] == "goods":
        error = record["goods"] in ("late", "short", "refused")  # rule 3, whatever the merchant was asked; not rule 4's "poor"
    if not error:
        return False
    if record["received_on"] > record["statement_on"] + dt.timedelta(days=60):  # rule 5: sent_on does not count
        return False
    if record["form"] not in ("letter", "web"):  # rule 6
        return False
    if record["identity"] == "lost":  # rule 7
        return False
    return record["earlier"] != "same"  # rule 8


def debt_owed(record: Record) -> bool:
    """15 U.S.C. 1692 ff. and 12 CFR Part 1006 as the clauses put it: owed when the planned step breaks any rule (rule 1)."""
    step, message = record["step"], record["message"]
    if record["demanded"] > record["authorized"]:  # rule 2
        return True
    if step == "suit" and (record["instruction"] != "court" or record["step_on"] > record["suit_limit"]):  # rule 3
        return True
    if step == "garnish" and (record["instruction"] != "court" or not record["judgment"]):  # rule 4
        return True
    in_time = record["message_on"] <= record["notice_on"] + dt.timedelta(days=30)
    if message == "dispute_written" and in_time and record["verification"] == "unmailed":  # rule 5
        return True
    if message in ("refusal_written", "stop_written") and step == "ask":  # rule 6: a remedy may be named, payment not asked for
        return True
    return step == "report" and message in ("dispute_written", "dispute_phone")  # rule 7


def deposit_owed(record: Record) -> bool:
    """Cal. Civ. Code 1950.5 as the clauses put it: the tenant gets the money back if anything is wrong with the deduction."""
    if record["statement_sent_on"] > record["moved_out_on"] + dt.timedelta(days=21):  # rule 4
        return True
    if record["charge"] == "upgrade":  # rule 2
        return True
    if record["charge"] == "rent":  # rule 2, and by rule 5 without papers
        return record["amount"] > record["rent_owed"]
    chargeable = "damage" if record["charge"] == "repair" else "soiled"
    if record["finding"] != chargeable or record["on_checklist"]:  # rules 2, 3
        return True
    if record["amount"] > 125 and (record["invoice"] in ("unsent", "estimate_slow") or not record["photos"]):  # rules 5, 6
        return True
    return record["inspection"] == "unlisted"  # rule 7


def refund_owed(record: Record) -> bool:
    """The return policy of Quillhaven Stores as its clauses put it."""
    if record["credit"] == "accepted":  # rule 9
        return False
    if record["payment"] == "gift_card":  # rule 8
        return False
    if record["returner"] == "recipient":  # rule 7, even for a defect
        return False
    if record["proof"] == "missing":  # rule 6
        return False
    days = (record["returned_on"] - record["received_on"]).days
    if record["report"] == "defective":  # rules 3 to 5: a defect lifts the short windows, the condition and final sale
        return days <= 90
    if record["terms"] == "final":  # rule 5
        return False
    electronics = record["department"] == "electronics"
    if record["report"] not in (("sealed",) if electronics else ("sealed", "opened")):  # rule 4
        return False
    window = 14 if electronics else {"online": 45, "store": 30}[record["channel"]]  # rule 2
    return days <= window


def subscription_owed(record: Record) -> bool:
    """Cal. Bus. & Prof. Code 17600 ff. and the company's own terms as the clauses put them."""
    if record["plan"] == "fixed":  # rule 2
        return False
    channels = ("email", "mail") if record["enrolled_by"] == "paper" else ("email", "mail", "chat_signed_in")
    if record["request_by"] not in channels:  # rules 3, 4
        return False
    if record["state"] == "california" and record["use"] == "household":  # rules 5, 6
        return True
    notice = (record["next_charge_on"] - record["requested_on"]).days
    return notice >= 10 and record["commitment_months"] == 0 and record["balance"] <= 30  # rule 7


def anniversary(day: dt.date, years: int) -> dt.date:
    """The same day `years` later; February 29 becomes February 28 where the later year has none."""
    try:
        return day.replace(year=day.year + years)
    except ValueError:
        return day.replace(year=day.year + years, day=28)


def recall_owed(record: Record) -> bool:
    """49 U.S.C. 30118-30120 as the clauses put it."""
    tire = record["kind"] == "tire"
    if record["campaign"] not in ("defect", "standard"):  # rule 2 (recall): comfort programs are not recalls
        return False
    if not record["in_range"]:  # rule 3 (range)
        return False
    if record["first_notice_on"] > anniversary(record["first_bought_on"], 5 if tire else 15):  # rule 4 (age)
        return False
    if tire and record["presented_on"] > record["owner_notice_on"] + dt.timedelta(days=180):  # rule 5 (tire_deadline)
        return False
    if record["repair"] == "cured":  # rule 6 (open); "uncured" since last year is past the 60 days: replacement or refund
        return False
    # rule 7 (exemption): only one that was granted counts; rule 1 (duty) for the rest; rule 8 (no_other_terms): no more tests
    return record["exemption"] != "granted"


def insurance_owed(record: Record) -> bool:
    """29 CFR 2560.503-1 as the clauses put it."""
    adverse = record["outcome"] in ("denied", "part", "not_enrolled", "ended")  # rule 2 (adverse): "review" is not decided
    if record["outcome"] == "misstated":  # rule 3 (cancelled): medical and disability coverage only; never for "unpaid"
        adverse = record["benefit"] in ("health", "disability")
    if not adverse:  # rule 1 (appeal)
        return False
    if record["benefit"] == "workers_comp":  # rule 4 (outside)
        return False
    limit = dt.timedelta(days=60 if record["benefit"] == "life" else 180)
    late = record["request_arrived"] > record["letter_received"] + limit  # rule 5 (deadline): letter_dated does not count
    if late and record["steps"]:  # rule 6 (steps): a letter without them starts no limit
        return False
    urgent = record["asked_by"] == "physician" and record["care"] == "urgent"  # rule 8 (urgent), exception to rule 7
    if record["asked_by"] != "member" and record["authorization"] != "signed" and not urgent:  # rule 7 (who)
        return False
    return record["earlier"] != "decided"  # rule 9 (once): a withdrawn appeal does not count


OWED: dict[str, Callable[[Record], bool]] = {
    "airline": airline_owed,
    "billing": billing_owed,
    "debt": debt_owed,
    "deposit": deposit_owed,
    "insurance": insurance_owed,
    "recall": recall_owed,
    "refund": refund_owed,
    "subscription": subscription_owed,
}
