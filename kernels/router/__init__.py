"""Expert routing by score (sqrtsoftplus, bias for selection only) and by token hash."""

from kernels.dispatch import Operation
from kernels.router import reference

route_scored = Operation("route_scored", {"reference": reference.route_scored})
route_hashed = Operation("route_hashed", {"reference": reference.route_hashed})
