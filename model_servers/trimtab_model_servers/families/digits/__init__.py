"""Networks of the digits pipeline: locators that find digits on a page, readers that classify one digit."""

from typing import Final

PAGE_SIDE_PX: Final = 96
