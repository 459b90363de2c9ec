/* test_verbs_bond_silence.c - several rails for an endpoint: on some of them, or on all, nothing comes back for a
 * while.
 */

#include "bond_rig.h"

static const char two[] = "sim2,sim2", three[] = "sim2,sim2,sim2", usual[] = "silence=5";
enum { ALL = 7 };

/* On these lanes nothing gets through; on the others it does again. */
static void mute(struct bond_rig *rig, unsigned lanes) {
    struct hr_bond *bond = bond_of(&rig->side[1]);
    for (int i = 0; i < bond->n; i++) hr_verbs_sim_mute(bond->rails[i]->ctx, lanes >> i & 1);
}

static void work(struct bond_rig *rig) {
    static const size_t sizes[] = {1, 1000, 8192, 70000, 262144, SLOT};
    size_t len = sizes[draw(rig, sizeof sizes / sizeof sizes[0])];
    start_job(rig, draw(rig, 3) == 0, len, 0, 0);
    send_told(&rig->side[draw(rig, 2)], draw(rig, 3000), -1);
}

static void work_for(struct bond_rig *rig, int64_t ms) {
    for (int64_t start = hr_now(); hr_now() - start < ms * HR_VERBS_MS; rest_since(start)) work(rig), turn(rig);
}

static uint64_t lost(const struct bond_rig *rig) {
    return bond_of(&rig->side[0])->counts.lost + bond_of(&rig->side[1])->counts.lost;
}

static uint32_t timeout_of(const struct bond_rig *rig) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    hr_verbs_sim.query_qp(bond_ep_of(&rig->side[0])->lanes[1].ep->qp, &attr, IBV_QP_TIMEOUT, &init);
    return attr.timeout;
}

/* Who chooses how long queue pairs wait has chosen when lanes end. */
TEST(queue_pairs_of_rails_outlast_the_heartbeat) {
    static const struct {
        const char *options;
        uint32_t timeout;
        int watched;
    } cases[] = {{NULL, 14, 0}, {usual, 18, 1}, {"silence=5,ack_timeout=12", 12, 0}};
    for (int i = 0; i < 3; i++) {
        struct bond_rig rig;
        bond_open(&rig, two, cases[i].options);
        CHECK_EQ(timeout_of(&rig), cases[i].timeout);
        CHECK_EQ(bond_of(&rig.side[0])->silence != 0, cases[i].watched);
        CHECK(carried(&rig));
        UNTIL(&rig, !bond_of(&rig.side[0])->tick && !bond_of(&rig.side[1])->tick); /* at rest it sleeps */
        bond_close(&rig);
    }
}

TEST(a_lane_that_is_silent_beside_others_is_taken_over) {
    for (unsigned which = 0; which < 3; which++) {
        struct bond_rig rig;
        bond_open(&rig, which == 2 ? three : two, usual);
        hurry(&rig);
        work_for(&rig, 200);
        int64_t start = hr_now();
        mute(&rig, 1u << which);
        UNTIL(&rig, (work(&rig), lost(&rig)));
        int64_t took = hr_now() - start;
        CHECK(took >= 300 * HR_VERBS_MS);
        CHECK(took < 5000 * HR_VERBS_MS); /* half a second where the machine is idle */
        UNTIL(&rig, quiet(&rig));         /* while it is silent still */
        mute(&rig, 0);
        UNTIL(&rig, (hurry(&rig), work(&rig), all_up(&rig)));
        for (int i = 0; i < 2; i++) CHECK_EQ(bond_of(&rig.side[i])->counts.lost, 1);
        settle(&rig);
        bond_close(&rig);
    }
}

/* Its end would not be told by the device, and nothing else is under way. */
TEST(one_message_on_a_silent_lane_is_enough) {
    struct bond_rig rig;
    bond_open(&rig, two, usual);
    struct bond_side *a = &rig.side[0];
    mute(&rig, 1u << bond_ep_of(a)->first);
    CHECK_EQ(send_told(a, 100, -1), HR_OK);
    UNTIL(&rig, quiet(&rig));
    CHECK_EQ(bond_of(a)->counts.lost, 1);
    CHECK(strstr(bond_ep_of(a)->detail, "while another rail carried"));
    mute(&rig, 0);
    settle(&rig);
    bond_close(&rig);
}

TEST(all_are_silent_for_a_second) {
    for (int busy = 0; busy < 2; busy++) {
        struct bond_rig rig;
        bond_open(&rig, two, usual);
        if (busy) work_for(&rig, 100);
        mute(&rig, ALL);
        work_for(&rig, 1500);
        CHECK(!quiet(&rig));
        mute(&rig, 0);
        UNTIL(&rig, quiet(&rig));
        work_for(&rig, 1000);
        settle(&rig);
        CHECK_EQ(lost(&rig), 0);
        CHECK_EQ(bond_of(&rig.side[0])->counts.resent + bond_of(&rig.side[0])->counts.redone, 0);
        bond_close(&rig);
    }
}

/* Nothing ends before others would have said that the peer is lost, and then it does. */
TEST(all_are_silent_for_good) {
    for (unsigned before = 0; before < 2; before++) { /* the last lane, or both */
        struct bond_rig rig;
        bond_open(&rig, two, "silence=1.5");
        if (before) {
            mute(&rig, 2);
            UNTIL(&rig, (work(&rig), lost(&rig)));
            UNTIL(&rig, quiet(&rig) && lanes_up(&rig.side[0]) == 1);
        }
        uint64_t so_far = lost(&rig);
        mute(&rig, ALL);
        int64_t start = hr_now();
        work_for(&rig, 1500);
        CHECK_EQ(lost(&rig), so_far);
        CHECK_EQ(rig.side[0].losses + rig.side[1].losses, 0);
        UNTIL(&rig, rig.side[0].losses || rig.side[1].losses || (work(&rig), 0));
        UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
        CHECK(hr_now() - start >= 2000 * HR_VERBS_MS);
        CHECK(hr_is_peer_error(rig.side[0].loss) && hr_is_peer_error(rig.side[1].loss));
        CHECK(strstr(rig.side[0].detail, "nothing came back") || strstr(rig.side[1].detail, "nothing came back"));
        mute(&rig, 0);
        bond_close(&rig);
    }
}

static int ended(const struct hr_bond_lane *lane, uint32_t before) { return lane->ep && lane->ep->head != before; }

/* It ends a little, again and again, while the other does much. */
TEST(a_lane_that_is_slow_is_kept) {
    struct bond_rig rig;
    bond_open(&rig, two, usual);
    const struct hr_bond_lane *lane = &bond_ep_of(&rig.side[0])->lanes[1];
    for (int i = 0; i < 6; i++) {
        mute(&rig, 2);
        work_for(&rig, 250);
        if (!lane->ep) break;
        uint32_t before = lane->ep->head;
        mute(&rig, 0);
        UNTIL(&rig, (work(&rig), ended(lane, before)));
    }
    CHECK_EQ(lost(&rig), 0);
    settle(&rig);
    bond_close(&rig);
}

/* So that something ends on a lane that is slow; and what is not posted yet when memory is taken back is not read. */
TEST(long_operations_go_in_short_work_requests) {
    struct bond_rig rig;
    bond_open(&rig, two, usual);
    struct bond_side *a = &rig.side[0], *b = &rig.side[1];
    struct hr_bond_lane *lanes = bond_ep_of(a)->lanes;
    CHECK_EQ(lanes[0].ep->longest, 64 << 10);
    lanes[0].rate = 5; /* 5 GB/s */
    hr_bond_watch_rate(&lanes[0]);
    CHECK(lanes[0].ep->longest > 8 << 20);
    for (int is_read = 0; is_read < 2; is_read++) {
        struct job *job = &rig.jobs[0];
        struct hr_rma rma = {.local = a->memory, .len = SLOT, .remote = &rig.rmem, .cookie = job};
        rma.with_notify = !is_read;
        rma.value = 0xff;
        *job = (struct job){.slot = -1};
        for (int i = 0; i < 2; i++) lanes[i].ep->longest = 4096; /* more of them than there is room for */
        memset(a->memory, 2, SLOT);
        memset(b->memory, is_read ? 1 : 0, SLOT);
        CHECK_EQ(is_read ? a->domain->ops->post_read(a->ep, &rma) : a->domain->ops->post_write(a->ep, &rma),
                 HR_INPROGRESS);
        CHECK(hr_verbs_under_way(lanes[0].ep) >= HR_VERBS_SENDS / 2);
        CHECK_EQ(a->domain->ops->cancel(a->ep, job), HR_OK);
        memset(a->memory, JUNK, SLOT);
        UNTIL(&rig, is_read || b->notices == 1);
        CHECK(carried(&rig));
        CHECK(all_junk(a->memory, SLOT));
        for (size_t i = 0; i < SLOT && !is_read; i++)
            if (b->memory[i] != 2) {
                CHECK(!"a write goes on from a copy");
                break;
            }
    }
    CHECK_EQ(lost(&rig), 0);
    bond_close(&rig);
}
