// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
	"github.com/sluice-net/sluice/store"
)

// join are the flags of `store join`.
type join struct {
	file, node, address string
	port                int
	dryRun              bool
}

func joinCommand(inv *invocation.Invocation) *cobra.Command {
	var j join
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Join this machine to a store with a token",
		Long: `Exchange a join token for the credentials of this machine's node. sluice-identity uses and
renews the credentials: set etcd.storeDir to the directory that the command prints. If the
token was created by "store token create --member", this machine becomes a member of the
store instead: start sluice-store afterwards. The token is read from a file or from standard
input, because other users can see arguments.`,
		Example: `  sluice store join --token-file join-token
  ssh member sluice store token create --member | sluice store join --address 192.0.2.2`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := machinePaths(inv)
			if err != nil {
				return err
			}
			changes, err := j.run(cmd.Context(), p, cmd.InOrStdin())
			if j.dryRun && err == nil {
				return inv.ShowPlan(changes)
			}
			return inv.ShowChanges(changes, err)
		},
	}
	cmd.Flags().StringVar(&j.file, "token-file", "-", "file with the token; -: standard input")
	cmd.Flags().StringVar(&j.node, "node", "", "name of the node (default: the machine's host name)")
	cmd.Flags().StringVar(&j.address, "address", "", "IP address at which the other machines reach the new member")
	cmd.Flags().IntVar(&j.port, "member-port", 23800, "port between members (setting memberPort of sluice-store)")
	invocation.ValidateFlag(cmd, &j.dryRun, "check the token's form and this machine; change nothing, and keep the token")
	return cmd
}

// machinePaths returns the directories of the instance for a command that changes files of this machine as root.
func machinePaths(inv *invocation.Invocation) (instance.Paths, error) {
	if inv.RunDir != "" {
		return instance.Paths{}, invocation.Usagef("--run-dir: not valid here; choose the directories with --instance")
	}
	p, err := instance.New(inv.Instance)
	if err != nil {
		return p, invocation.Usagef("--instance: %w", err)
	}
	return p, nodefiles.Root()
}

func (j join) run(ctx context.Context, p instance.Paths, stdin io.Reader) (changes []string, err error) {
	token, err := j.token(stdin)
	if err != nil {
		return nil, err
	}
	if j.node == "" {
		if j.node, err = os.Hostname(); err != nil {
			return nil, fmt.Errorf("host name: %w; give --node", err)
		}
	}
	if token.Member {
		return j.member(ctx, p, token)
	}
	if j.address != "" {
		return nil, invocation.Usagef("--address: the token is for a node; make one with --member")
	}
	s := identityService()
	if j.dryRun {
		return append(nodefiles.Plan(p, s), "use the token, which is then spent",
			fmt.Sprintf("store the credentials of node %s in %s", j.node, p.ServiceStateDir(s.Name))), nil
	}
	if changes, err = nodefiles.Prepare(p, s); err != nil {
		return changes, err
	}
	request, err := store.NewRequest()
	if err != nil {
		return changes, err
	}
	c, err := store.Enrol(ctx, token, j.node, request)
	if err != nil {
		return changes, err
	}
	dir := p.ServiceStateDir(s.Name)
	if err := asUser(s, func() error { return c.Save(dir) }); err != nil {
		return changes, err
	}
	return append(changes, fmt.Sprintf("node %s has credentials for epoch %d: set etcd.storeDir of sluice-identity to %s",
		j.node, c.Epoch, dir)), nil
}

func (j join) token(stdin io.Reader) (store.Token, error) {
	const limit = 64 << 10
	from := stdin
	if j.file != "-" {
		f, err := os.Open(j.file)
		if err != nil {
			return store.Token{}, err
		}
		defer f.Close()
		from = f
	}
	text, err := io.ReadAll(io.LimitReader(from, limit))
	if err != nil {
		return store.Token{}, fmt.Errorf("read the token: %w", err)
	}
	return store.ParseToken(strings.TrimSpace(string(text)))
}

func (j join) member(ctx context.Context, p instance.Paths, token store.Token) (changes []string, err error) {
	if _, err := netip.ParseAddr(j.address); err != nil {
		return nil, invocation.Usagef("--address: %q is not an IP address; a member needs one for the others", j.address)
	}
	s := nodefiles.Store()
	dir := p.ServiceStateDir(s.Name)
	if j.dryRun {
		if err := asUser(s, func() error { return store.FreeForMember(dir) }); err != nil {
			return nil, err
		}
		return append(nodefiles.Plan(p, s), "use the token, which is then spent",
			fmt.Sprintf("store the state of the new member %s in %s", j.node, dir)), nil
	}
	if changes, err = nodefiles.Prepare(p, s); err != nil {
		return changes, err
	}
	// Before the token is used.
	if err := asUser(s, func() error { return store.FreeForMember(dir) }); err != nil {
		return changes, err
	}
	r, err := store.EnrolMember(ctx, token, j.node, net.JoinHostPort(j.address, strconv.Itoa(j.port)))
	if err != nil {
		return changes, err
	}
	if err := asUser(s, func() error { return store.SaveMember(dir, j.node, j.address, r) }); err != nil {
		return changes, err
	}
	return append(changes, fmt.Sprintf("%s becomes a member of epoch %d when sluice-store starts",
		j.node, r.GetEpoch())), nil
}

func restoreCommand(inv *invocation.Invocation) *cobra.Command {
	dryRun := false
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore the store on this machine from a snapshot",
		Long: `Prepare sluice-store on this machine to begin the next epoch at its next start, with the
data of a snapshot and as the only member. Stop sluice-store and all other members first,
and join the other members again afterwards. Nodes find the new epoch by themselves.
Existing join tokens become invalid. The credentials of nodes are restored from the
snapshot: if you revoked nodes after it was saved, revoke them again. The former data stay
in a directory etcd.epoch-N of the state directory.`,
		Args: invocation.Args(1, "a file"),
		RunE: func(_ *cobra.Command, args []string) error {
			f, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer f.Close()
			return begin(inv, f, dryRun)
		},
	}
	invocation.ValidateFlag(cmd, &dryRun, "check whether the store can continue here; change nothing")
	return cmd
}

func rebuildCommand(inv *invocation.Invocation) *cobra.Command {
	dryRun := false
	cmd := &cobra.Command{
		Use:   "rebuild",
		Short: "Rebuild the store from the data of this machine only",
		Long: `Prepare sluice-store on this machine to begin the next epoch at its next start, with its own
data and as the only member. Use this command when more than half of the members are lost.
Writes that this member had not received are lost. Stop sluice-store and all other members
first, and join the other members again afterwards. Nodes find the new epoch by themselves.`,
		Args: invocation.Args(0, ""),
		RunE: func(*cobra.Command, []string) error { return begin(inv, nil, dryRun) },
	}
	invocation.ValidateFlag(cmd, &dryRun, "check whether the store can continue here; change nothing")
	return cmd
}

// begin requests the next epoch, with a snapshot or with this member's own data. With dryRun, it only checks that this
// is possible.
func begin(inv *invocation.Invocation, snapshot io.Reader, dryRun bool) error {
	p, err := machinePaths(inv)
	if err != nil {
		return err
	}
	s, epoch := nodefiles.Store(), uint64(0)
	err = asUser(s, func() (err error) {
		if dryRun {
			epoch, err = store.CheckRestore(p.ServiceStateDir(s.Name))
			return err
		}
		epoch, err = store.RequestRestore(p.ServiceStateDir(s.Name), snapshot)
		return err
	})
	if err != nil {
		return err
	}
	if dryRun {
		return inv.ShowPlan([]string{fmt.Sprintf("begin epoch %d, or a later one, when sluice-store starts", epoch)})
	}
	return inv.ShowChanges([]string{fmt.Sprintf("epoch %d, or a later one, begins when sluice-store starts", epoch)}, nil)
}

func identityService() nodefiles.Service {
	for _, s := range nodefiles.Services() {
		if s.Name == "identity" {
			return s
		}
	}
	panic("the services of a node lack identity")
}

// errUser is returned where the kernel does not change the user of file accesses.
var errUser = errors.New("change the user of file accesses")
