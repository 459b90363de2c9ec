# verbs_choose.pxi - hrdma.verbs: which devices, ports and GIDs a communicator would use, and why.
import collections as _collections

VerbsPath = _collections.namedtuple("VerbsPath", ["port", "index", "gid", "kind", "interface", "mtu"])
VerbsFound = _collections.namedtuple("VerbsFound", ["name", "reason", "distance", "why", "paths"])


cdef object verbs_path(const hr_verbs_path *path):
    cdef char kind[40]
    hr_verbs_path_kind(path, kind)
    gid = str(_ipaddress.IPv6Address((<char *> path.gid.raw)[:16]))
    return VerbsPath(path.port, path.index, gid, text_of(kind), text_of(path.ndev), 128 << <int> path.mtu)


def verbs_found(str names not None="", *, str ifname not None="", gid_index=None, warn=None):
    """The devices that `choose` chooses, with all that could be used of them.

    Parameters
    ----------
    names, ifname, gid_index, warn
        As of `choose`.

    Returns
    -------
    list of (VerbsFound or None)
        By number of the rail. ``name``; ``reason``: why this device; ``distance``: as the kernel counts between NUMA
        nodes, 10 for the same one; ``paths``: at most 8, best first, each with ``port``, ``index``, ``gid`` (as an
        IPv6 address), ``kind`` (such as ``"IPv4-mapped RoCE v2"``), ``interface`` and ``mtu`` in bytes; ``why`` the
        first of these is.

    Raises
    ------
    DeviceError, ValueError
        As of `choose`.
    """
    cdef hr_verbs_wish wish
    cdef hr_verbs_found found[HR_VERBS_RAILS + 1]
    cdef char detail[256]
    cdef char left[HR_LEFT]
    cdef char why[200]
    cdef int n = 0, i, k
    cdef hr_status status
    cdef bytes device = names.encode(), interfaces = ifname.encode()
    memset(&wish, 0, sizeof(wish))
    wish.gid = gid_of(gid_index)
    wish.ifname = <const char *> interfaces if interfaces else NULL
    detail[0] = 0
    status = hr_verbs_devices_find(&wish, <const char *> device, found, &n, left, detail)
    if status == HR_ERR_INVALID:
        raise ValueError(text_of(detail))
    if status != HR_OK:
        raise DeviceError(text_of(detail))
    chosen = []
    for i in range(n):
        if found[i].ctx == NULL:
            chosen.append(None)
            continue
        hr_verbs_path_why(&found[i].wish, &found[i].paths, 0, why)
        paths = [verbs_path(&found[i].paths.list[k]) for k in range(found[i].paths.n)]
        chosen.append(VerbsFound(text_of(found[i].ctx.device.name), text_of(found[i].reason), found[i].distance,
                                 text_of(why), paths))
        found[i].verbs.close_device(found[i].ctx)
    if left[0] and warn is not None:
        warn(text_of(left))
    return chosen


def verbs_choose(str names not None="", *, str ifname not None="", gid_index=None, warn=None):
    """Which devices a communicator would use, and what of them: chosen as provider verbs does.

    Parameters
    ----------
    names : str
        As HRDMA_DEVICES: ``"mlx5_0,mlx5_*:1"``, best first; empty: the real ones; ``"*"``: software, if there is no
        other.
    ifname : str
        As HRDMA_IFNAME: interfaces, or networks, that GIDs may be of.
    gid_index : int, optional
        That GID alone.
    warn : callable, optional
        Called with one line of text where something of `names` is done without.

    Returns
    -------
    list of (tuple of (str, int, int) or None)
        By number of the rail: name, port and GID index, which are the arguments of `Device`. None: the device that is
        named there will not do now. At least one that is not None; at most three entries.

    Raises
    ------
    DeviceError
        None will do, or one that is named is not there, or has no such port; the message says why.
    ValueError
        `ifname`, or a port in `names`, is wrong.

    Notes
    -----
    Opens every device that comes into question for a moment.
    """
    found = verbs_found(names, ifname=ifname, gid_index=gid_index, warn=warn)
    return [one and (one.name, one.paths[0].port, one.paths[0].index) for one in found]
