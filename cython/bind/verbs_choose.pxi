# verbs_choose.pxi - hrdma.verbs: which devices, ports and GIDs a communicator would use, and why.

cdef tuple verbs_path(const hr_verbs_path *path):
    cdef char kind[40]
    hr_verbs_path_kind(path, kind)
    gid = str(_ipaddress.IPv6Address((<char *> path.gid.raw)[:16]))
    return path.port, path.index, gid, text_of(kind), text_of(path.ndev), 128 << <int> path.mtu


def verbs_found(str names not None, str ifname not None, gid_index, warn):
    """What `hrdma.verbs.found` makes its tuples of."""
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
        chosen.append((text_of(found[i].ctx.device.name), text_of(found[i].reason), found[i].distance,
                       text_of(why), paths))
        found[i].verbs.close_device(found[i].ctx)
    if left[0] and warn is not None:
        warn(text_of(left))
    return chosen
