// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package member

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"

	"github.com/sluice-net/sluice/kit/log"
)

var (
	// ErrNoMember is returned for an unknown member.
	ErrNoMember = errors.New("no such member")
	// ErrNotChanged is returned for a change of members that would be unsafe.
	ErrNotChanged = errors.New("the members are not changed")
)

// Server returns etcd's server in this process. Calls with the context of Root have every permission.
func (m *Member) Server() *etcdserver.EtcdServer { return m.etcd.Server }

// Peer is a member as this one sees it.
type Peer struct {
	ID            uint64
	Name          string // empty until the member has started
	PeerAddress   string // host:port; empty for the only member
	ClientAddress string // host:port; empty if only its machine reaches it, or until it has started
	Voting        bool
	Leader, Self  bool
}

// Peers returns the members, by name.
func (m *Member) Peers() (out []Peer) {
	s := m.etcd.Server
	lead := s.Leader()
	for _, x := range s.Cluster().Members() {
		out = append(out, Peer{
			ID: uint64(x.ID), Name: x.Name, PeerAddress: host(x.PeerURLs), ClientAddress: host(x.ClientURLs),
			Voting: !x.IsLearner, Leader: x.ID == lead, Self: x.ID == s.MemberID(),
		})
	}
	slices.SortFunc(out, func(a, b Peer) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// Add adds a member without a vote, and returns etcd's list of the addresses of all members. It may be repeated.
func (m *Member) Add(ctx context.Context, address string) (initialCluster func(name string) string, err error) {
	url := "https://" + address
	known := false
	for _, p := range m.Peers() {
		known = known || p.Name == "" && p.PeerAddress == address
		if p.Name == "" && p.PeerAddress != address {
			// etcd does not start a member if another one was added after it.
			return nil, fmt.Errorf("%w: the new member at %s has not started; start it, or remove it "+
				"(sluice store member remove %s)", ErrNotChanged, p.PeerAddress, p.PeerAddress)
		}
	}
	if !known {
		urls, err := types.NewURLs([]string{url})
		if err != nil {
			return nil, fmt.Errorf("%w: address %q: %w", ErrNotChanged, address, err)
		}
		now := m.o.Now()
		add := membership.NewMemberAsLearner("", urls, "", &now)
		if _, err := m.etcd.Server.AddMember(Root(ctx), *add); err != nil {
			return nil, notChanged("add a member at "+address, err)
		}
	}
	peers := m.Peers()
	return func(name string) string {
		var all []string
		for _, p := range peers {
			of := p.Name
			if p.PeerAddress == address {
				of = name
			}
			all = append(all, of+"=https://"+p.PeerAddress)
		}
		return strings.Join(all, ",")
	}, nil
}

// Remove removes another member, or with validateOnly checks that there is one. The name of a member that has
// never started is its address.
func (m *Member) Remove(ctx context.Context, name string, validateOnly bool) error {
	peers := m.Peers()
	i := slices.IndexFunc(peers, func(p Peer) bool { return cmp.Or(p.Name, p.PeerAddress) == name && name != "" })
	switch {
	case i < 0:
		return fmt.Errorf("%w: %q", ErrNoMember, name)
	case peers[i].Self:
		return fmt.Errorf("%w: %q is this member; call another one", ErrNotChanged, name)
	case validateOnly:
		return nil
	}
	_, err := m.etcd.Server.RemoveMember(Root(ctx), peers[i].ID)
	return notChanged("remove the member "+name, err)
}

func notChanged(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, etcderrors.ErrUnhealthy), errors.Is(err, etcderrors.ErrNotEnoughStartedMembers):
		return fmt.Errorf("%w: %s: %w; all voting members must have been connected for 5 s, "+
			"and more than half of the others must run (sluice store status)", ErrNotChanged, what, err)
	case errors.Is(err, membership.ErrTooManyLearners):
		return fmt.Errorf("%w: %s: two members without a vote exist; start them, or remove them", ErrNotChanged, what)
	case errors.Is(err, membership.ErrPeerURLexists):
		return fmt.Errorf("%w: %s: a member with this address exists; remove it first", ErrNotChanged, what)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// checkEvery is the interval of Maintain's checks.
const checkEvery = 2 * time.Second

// Maintain does the work that etcd leaves to an administrator, until ctx ends: it gives new members a vote, updates the
// address of this member, renews its certificate for the others, and returns disk space.
func (m *Member) Maintain(ctx context.Context) error {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	renewed := m.o.Now()
	for {
		m.keepAddress(ctx)
		if m.etcd.Server.Leader() == m.etcd.Server.MemberID() {
			m.promote(ctx)
		}
		if now := m.o.Now(); now.Sub(renewed).Abs() > 24*time.Hour {
			if err := m.RenewPeer(); err != nil {
				m.o.Log.Error("renew the certificate for other members", log.Err(err))
			} else {
				renewed = now
			}
		}
		m.defragment(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// keepAddress publishes the address of this member to the cluster when the setting has changed.
func (m *Member) keepAddress(ctx context.Context) {
	s := m.etcd.Server
	self := s.Cluster().Member(s.MemberID())
	want := []string{nowhere.String()}
	if m.o.Address != "" {
		u := URL(m.o.Address, m.o.MemberPort)
		want[0] = u.String()
	}
	if self == nil || slices.Equal(self.PeerURLs, want) {
		return
	}
	changed := *self
	changed.PeerURLs = want
	if _, err := s.UpdateMember(Root(ctx), changed); err != nil {
		m.o.Log.Warn("the address of this member cannot be changed yet", "address", want[0], log.Err(err))
		return
	}
	m.o.Log.Info("changed the address of this member", "address", want[0])
}

// promote gives votes to members that have all data, if the number of votes then becomes odd. An even number is no
// better than one vote less: losing half of the members ends the quorum.
func (m *Member) promote(ctx context.Context) {
	voting := 0
	var ready []Peer
	for _, p := range m.Peers() {
		switch {
		case p.Voting:
			voting++
		case p.Name != "":
			ready = append(ready, p)
		}
	}
	count := len(ready)
	if (voting+count)%2 == 0 {
		count--
	}
	for i := range max(count, 0) {
		_, err := m.etcd.Server.PromoteMember(Root(ctx), ready[i].ID)
		if err != nil {
			if !errors.Is(err, etcderrors.ErrLearnerNotReady) {
				m.o.Log.Warn("a new member gets no vote yet", "member", ready[i].Name, log.Err(err))
			}
			return
		}
		m.o.Log.Info("a new member has a vote", "member", ready[i].Name)
	}
}

// worthwhile is the size above which the file is rewritten if less than half of it is in use.
const worthwhile = 64 << 20

// Pauses before a full database is rewritten: etcd removes compacted revisions in the background, and updates the size
// in use with later writes only, which a full store refuses.
const (
	afterCompaction = 10 * time.Second
	whileFull       = 10 * time.Minute
)

// defragment returns unused space of the database to the disk, and ends the alarm by which etcd refuses writes. This
// member does not answer while it copies its data.
func (m *Member) defragment(ctx context.Context) {
	s := m.etcd.Server
	size, used := s.Backend().Size(), s.Backend().SizeInUse()
	full := slices.ContainsFunc(s.Alarms(), func(a *pb.AlarmMember) bool {
		return a.Alarm == pb.AlarmType_NOSPACE && a.MemberID == uint64(s.MemberID())
	})
	now := m.o.Now()
	if first := s.KV().FirstRev(); full && first != m.compacted {
		m.compacted, m.rewrite = first, now.Add(afterCompaction)
	}
	again := full && size > m.o.Quota*9/10 && !now.Before(m.rewrite)
	if again {
		m.rewrite = now.Add(whileFull)
	}
	if size > worthwhile && used < size/2 || again {
		if err := s.Defragment(); err != nil {
			m.o.Log.Error("defragment the database", "bytes", size, log.Err(err))
			return
		}
		m.o.Log.Info("the database was defragmented", "bytes", size, "now", s.Backend().Size())
	}
	if full && s.Backend().Size() <= m.o.Quota*9/10 {
		_, err := s.Alarm(Root(ctx), &pb.AlarmRequest{
			Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE, MemberID: uint64(s.MemberID()),
		})
		if err != nil {
			m.o.Log.Warn("cannot clear the alarm NOSPACE", log.Err(err))
			return
		}
		m.o.Log.Info("the store has space again and accepts writes")
	}
}

// Full reports whether the store refuses writes because the database of a member has its largest size.
func (m *Member) Full() bool {
	return slices.ContainsFunc(m.etcd.Server.Alarms(), func(a *pb.AlarmMember) bool {
		return a.Alarm == pb.AlarmType_NOSPACE
	})
}

// Sizes returns the size of the database, what of it is used, and its limit, in bytes.
func (m *Member) Sizes() (size, used, limit int64) {
	b := m.etcd.Server.Backend()
	return b.Size(), b.SizeInUse(), m.o.Quota
}

// Leads reports whether a leader is known: without one the members have no quorum, as far as this one knows.
func (m *Member) Leads() bool { return m.etcd.Server.Leader() != 0 }

// ClusterID returns the ID of etcd's cluster.
func (m *Member) ClusterID() uint64 { return uint64(m.etcd.Server.Cluster().ID()) }

// Snapshot writes a copy of the database and its SHA-256, which is the form of `etcdctl snapshot save`.
func (m *Member) Snapshot(w io.Writer) error {
	snap := m.etcd.Server.Backend().Snapshot()
	defer snap.Close() //nolint:errcheck // a read
	sum := sha256.New()
	if _, err := snap.WriteTo(io.MultiWriter(w, sum)); err != nil {
		return err
	}
	_, err := w.Write(sum.Sum(nil))
	return err
}

// ClusterToken returns etcd's token of the cluster, which a member needs to join.
func (m *Member) ClusterToken() string { return m.state.ClusterToken }
