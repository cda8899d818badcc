"""The two roles that every transaction on PostgreSQL runs as (docs/adr/0011-two-roles-and-forced-row-security.md).

Rule: the login of the control plane can do nothing by itself. A transaction enters one of the two for as long as it
lasts: `coatcheck_tenant`, whose policies show the rows of the tenant named in the same statement and no others, or
`coatcheck_platform`, whose policies show every tenant's. Neither owns anything, bypasses row security or truncates.
"""

from typing import Final

TENANT_ROLE: Final = "coatcheck_tenant"
PLATFORM_ROLE: Final = "coatcheck_platform"
TENANT_SETTING: Final = "coatcheck.tenant"
