/* paths.h - devices that will do, the ways out of them, and what two ends tell each other of these. */
#ifndef HR_VERBS_PATHS_H
#define HR_VERBS_PATHS_H

#include <stdint.h>

#include "hr/net.h"
#include "hr/provider.h"
#include "providers/verbs/backend.h"

enum {
    HR_VERBS_PATHS = 8,
    HR_VERBS_PAIRS = 16,
    HR_VERBS_REASON = 100,
    HR_VERBS_RAILS = 3,                               /* devices of a domain: a descriptor has room for so many keys */
    HR_VERBS_BEHIND = HR_VERBS_RAILS * HR_VERBS_PATHS /* interfaces behind them, at most */
};

/* What of a device was asked for. */
struct hr_verbs_wish {
    int port;           /* 0: any */
    int gid;            /* index; -1: any */
    const char *ifname; /* interface grammar, or NULL */
};

/* A way out of the device: a GID of an active port. */
struct hr_verbs_path {
    union ibv_gid gid;
    uint16_t lid;
    uint8_t port, index, kind, mtu, ethernet;
    uint8_t nth;            /* of its kind on its port */
    char ndev[IF_NAMESIZE]; /* the interface behind it; "": none is known */
};
struct hr_verbs_paths { /* best first */
    struct hr_verbs_path list[HR_VERBS_PATHS];
    int n;
    int excluded;         /* GIDs that the interface grammar leaves out */
    uint32_t max_message; /* that every port takes, the inactive ones too */
};

/* A device that was opened and will do. */
struct hr_verbs_found {
    const struct hr_verbs_backend *verbs;
    struct ibv_context *ctx; /* NULL: none has this number */
    struct ibv_device_attr attr;
    struct hr_verbs_wish wish;
    struct hr_verbs_paths paths;
    int is_sim, is_tcp, software, distance;
    char reason[HR_VERBS_REASON];              /* why this one */
    char behind[HR_VERBS_BEHIND][IF_NAMESIZE]; /* of device "tcp": interfaces of the devices that it stands in for */
};

/* The same as the peer hears of it. */
struct hr_verbs_end {
    union ibv_gid gid;
    uint16_t lid;
    uint8_t mtu, kind;
    uint32_t zero;
};

/* What both ends tell of themselves once the job key is proved. */
struct hr_verbs_open {
    uint64_t magic;
    uint32_t version, stream;
    uint32_t message;
    uint8_t rd_atomic, npaths, fixed, zero; /* fixed: the GID was asked for, whatever its kind */
    uint64_t nonce;                         /* goes into the descriptors that this end will hand out */
    uint64_t session, life;                 /* of a lane: which bond calls, for the how many-th time; else 0 */
    struct hr_verbs_end paths[HR_VERBS_PATHS];
};

/* What is said while pairs are tried; turn: which. */
enum hr_verbs_word_kind { HR_VERBS_TRY = 1, HR_VERBS_READY, HR_VERBS_GOOD, HR_VERBS_BAD };
/* Why a pair will not do, so that both ends can say it. */
enum hr_verbs_bad {
    HR_VERBS_UNREACHABLE = 1, /* retries exceeded: nothing gets there */
    HR_VERBS_NARROW,          /* small packets do, whole ones do not */
    HR_VERBS_SILENT,          /* no answer in time */
    HR_VERBS_ONE_WAY,         /* packets get there, and none comes back */
    HR_VERBS_NO_QP,           /* of a reason that is the end's own */
    HR_VERBS_STATUS = 32,     /* and on: with that ibv_wc_status */
    HR_VERBS_BAD_END = HR_VERBS_STATUS + IBV_WC_GENERAL_ERR + 1
};
struct hr_verbs_word { /* what is not of its kind is 0 */
    uint16_t kind, turn;
    uint32_t qpn, psn, room; /* TRY; room: messages that it may be sent at first */
    uint32_t why;            /* BAD: enum hr_verbs_bad */
};

/* One path of either side, tried together. */
struct hr_verbs_pair {
    uint8_t active, passive; /* indices into their lists */
    int goodness;
};

/* device.c */
int hr_verbs_device_count(const char **why_p);
/* Those to be used, open, by the number of the rail, at least one; ctx NULL: what has that number is named and will not
 * do now. found has room for one that is looked at and left. left: what is done without, "": nothing. */
hr_status hr_verbs_devices_find(const struct hr_verbs_wish *wish, const char *device,
                                struct hr_verbs_found found[HR_VERBS_RAILS + 1], int *n_p, char left[HR_LEFT],
                                char detail[256]);
/* One more that is done without. */
void hr_verbs_leave(char left[HR_LEFT], const char *name, const char *why);
/* Device "tcp", open, to stand in for these. */
hr_status hr_verbs_device_spare(const struct hr_verbs_wish *wish, const struct hr_verbs_found *rails, int n,
                                struct hr_verbs_found *found, char detail[256]);
/* Whether it is the better one: it is no software, or nearer to this processor, or as near and has the larger MTU. */
int hr_verbs_nearer(const struct hr_verbs_found *a, const struct hr_verbs_found *b);
/* A device of the kernel's that the library does not list, for want of a driver; 0: there is none. folder: of sysfs. */
int hr_verbs_driverless(const char *folder, struct ibv_device **list, int n, char name[64]);

/* paths.c */
void hr_verbs_gid_text(const union ibv_gid *gid, char text[64]);
/* 0: it is none that a socket could be called at. */
int hr_verbs_gid_address(const union ibv_gid *gid, union hr_sockaddr *a);
hr_status hr_verbs_paths_scan(const struct hr_verbs_wish *wish, const struct hr_verbs_backend *verbs,
                              struct ibv_context *ctx, int ports, struct hr_verbs_paths *paths, char detail[256]);
void hr_verbs_path_text(const struct hr_verbs_path *path, char text[160]);
/* Of what kind its GID is, in words. */
void hr_verbs_path_kind(const struct hr_verbs_path *path, char text[40]);
/* Why nothing goes through a port that is not active, and what mends that. */
void hr_verbs_port_idle(const struct ibv_device *device, int port, const struct ibv_port_attr *attr, char text[256]);
/* Why the i-th goes before those behind it. */
void hr_verbs_path_why(const struct hr_verbs_wish *wish, const struct hr_verbs_paths *paths, int i, char text[200]);
/* As the kernel counts it: 10 for the same node, or where nothing is known. */
int hr_verbs_numa_distance(const struct ibv_device *device, unsigned node);
/* The same list at both ends, best first. Returns how many. */
int hr_verbs_pairs(const struct hr_verbs_open *active, const struct hr_verbs_open *passive,
                   struct hr_verbs_pair pairs[HR_VERBS_PAIRS]);

#endif
