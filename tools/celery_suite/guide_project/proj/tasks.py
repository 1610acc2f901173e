"""The tasks, functions and values that the guide's examples use without defining them."""

from __future__ import annotations

import contextlib
import re
import time
from unittest import mock
from uuid import uuid4

import celery
from celery import Task, chain, chord, group, signature
from celery.utils.log import get_task_logger
from kombu import Exchange, Queue

from proj.celery import app

with contextlib.suppress(ImportError):
    from celery.canvas import StampingVisitor

__all__ = ["Exchange", "Queue", "Task", "celery", "chain", "chord", "get_task_logger", "group", "re", "signature"]
__all__ += ["StampingVisitor", "time", "uuid4"]


@app.task
def add(x, y, debug=False):
    return x + y


@app.task
def mul(x, y):
    return x * y


@app.task
def tsum(numbers):
    return sum(numbers)


@app.task
def xsum(numbers):
    return sum(sum(number) if isinstance(number, list) else number for number in numbers)


@app.task
def task(*args, **kwargs):
    return len(args)


@app.task
def other_task(value=None):
    return value


@app.task
def reset_buffers():
    return None


@app.task
def import_contact(contact):
    return contact


@app.task
def notify_complete(identifier):
    return identifier


@app.task
def create_user(username, first, last, email):
    return username


@app.task
def import_contacts(user):
    return user


@app.task
def send_welcome_email(user):
    return user


@app.task
def log_result(value):
    return value


@app.task
def log_error(request, exc, traceback):
    return None


@app.task
def fail():
    raise ValueError("fail")


@app.task
def raising_task():
    raise ValueError("something something")


@app.task
def charge(account, card):
    return account


@app.task
def expand_abbreviations(article):
    return article


def decorator(function):
    return function


decorator1 = decorator2 = decorator
arg1, arg2 = 1, 2
args, kwargs, options = (2, 2), {}, {}
account, article_id, import_id, result = 1, 102, 7, 4
contacts = ["a@example.com", "b@example.com"]
sig = add.s(2, 2)
TIMEOUT = 10
URL = "http://localhost"
logger = get_task_logger("tasks")
Twitter = mock.MagicMock()
requests = mock.MagicMock()
