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
}

func joinCommand(inv *invocation.Invocation) *cobra.Command {
	var j join
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Join this machine to a store with a token",
		Long: `Exchange a join token for the credentials of this machine's node, which sluice-identity then
uses and renews: set etcd.storeDir to the directory that the command prints. With a token of
"store token create --member", this machine becomes a member instead: start sluice-store
afterwards. The token is read from a file or from standard input, because other users see
arguments.`,
		Example: `  sluice store join --token-file join-token
  ssh member sluice store token create --member | sluice store join --address 192.0.2.2`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := machinePaths(inv)
			if err != nil {
				return err
			}
			changes, err := j.run(cmd.Context(), p, cmd.InOrStdin())
			return inv.ShowChanges(changes, err)
		},
	}
	cmd.Flags().StringVar(&j.file, "token-file", "-", "file with the token; -: standard input")
	cmd.Flags().StringVar(&j.node, "node", "", "name of the node (default: the machine's host name)")
	cmd.Flags().StringVar(&j.address, "address", "", "IP address of a new member for the other machines")
	cmd.Flags().IntVar(&j.port, "member-port", 23800, "setting memberPort of the members")
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
	if changes, err = nodefiles.Prepare(p, s); err != nil {
		return changes, err
	}
	dir := p.ServiceStateDir(s.Name)
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
		Short: "Continue the store on this machine with a snapshot",
		Long: `Have sluice-store on this machine, which must be stopped, begin the next epoch with the data
of a snapshot and one member at its next start. Nodes move to it by themselves. Stop the
other members first, and join them again. Join tokens end, and credentials are those of the
snapshot: revoke nodes again that were revoked since. The former data stay in a directory
etcd.epoch-N of the state directory.`,
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
		Short: "Continue the store with the data of this machine alone",
		Long: `Have sluice-store on this machine, which must be stopped, begin the next epoch with its own
data and one member at its next start. Use it when more than half of the members are lost.
Writes that this member had not received are lost. Stop the other members first, and join
them again. Nodes move to the new epoch by themselves.`,
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
	text := "epoch %d, or a later one, begins when sluice-store starts"
	if dryRun {
		text = "nothing was changed: --dry-run; epoch %d, or a later one, would begin when sluice-store starts"
	}
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
	return inv.ShowChanges([]string{fmt.Sprintf(text, epoch)}, nil)
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
