"""Tasks for products."""

from __future__ import annotations

from celery import Task, shared_task
from celery.utils.log import get_task_logger
from django.db.models import F

from catalog.models import Product
from orders.models import Event

logger = get_task_logger(__name__)


class DatabaseTask(Task):
    """A task that caches the names of products, and records what fails."""

    abstract = True
    max_retries = 2
    _names = None

    @property
    def names(self):
        if self._names is None:
            self._names = dict(Product.objects.values_list("name", "pk"))
        return self._names

    def on_success(self, retval, task_id, args, kwargs):
        Event.objects.create(kind="handler", text=f"{self.name} {retval['deleted']}")

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        Event.objects.create(kind="handler", text=f"{self.name} {exc!r} {task_id == self.request.id}")


@shared_task
def import_product(name, price, stock=0, *, on_sale=False):
    product, created = Product.objects.update_or_create(
        name=name, defaults={"price": price, "stock": stock, "on_sale": on_sale}
    )
    logger.info("%s %s", "created" if created else "updated", name)
    return product.name


@shared_task(ignore_result=True)
def end_sales():
    Product.objects.filter(on_sale=True).update(on_sale=False)


@shared_task(bind=True)
def reindex(self):
    names = list(Product.objects.order_by("name").values_list("name", flat=True))
    for number, name in enumerate(names, 1):
        self.update_state(state="PROGRESS", meta={"current": number, "total": len(names), "name": name})
    return {"indexed": len(names), "queue": self.request.delivery_info["routing_key"]}


@shared_task
def price_of(name, quantity):
    return Product.objects.get(name=name).price * quantity


@shared_task
def take_from_stock(name, quantity):
    return Product.objects.filter(name=name, stock__gte=quantity).update(stock=F("stock") - quantity)


@shared_task(base=DatabaseTask, bind=True, autoretry_for=(KeyError,), default_retry_delay=0.1)
def delete_product(self, name):
    deleted, _ = Product.objects.filter(pk=self.names[name]).delete()
    return {"deleted": deleted, "retries": self.request.retries, "max_retries": self.max_retries}
