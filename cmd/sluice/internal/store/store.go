// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store shows and changes sluice-store, and joins this machine to one.
package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// Command is `store`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("store", "Show and change sluice-store, or join a machine to it",
		statusCommand(inv),
		invocation.Group("token", "Make tokens by which machines join", createTokenCommand(inv)),
		joinCommand(inv), revokeCommand(inv),
		invocation.Group("member", "Change the members of the store", removeMemberCommand(inv)),
		invocation.Group("snapshot", "Save and restore the data of the store",
			saveCommand(inv), restoreCommand(inv)),
		rebuildCommand(inv),
	)
}

// client shortens the calls of package invocation.
type client = storev1.StoreServiceClient

func statusCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the members, the nodes and the database of the store",
		Long: `Show the members, the nodes and the database of the store as the member of this machine
knows them. The exit code is 3 if a problem is shown.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := invocation.Ask(cmd.Context(), inv, invocation.Store, client.GetStatus, &storev1.GetStatusRequest{})
			if err != nil {
				return err
			}
			if err := inv.Show(message.Of(r), func(w io.Writer) { write(w, r) }); err != nil {
				return err
			}
			if len(r.GetService().GetProblems()) > 0 {
				return invocation.ErrNotReady
			}
			return nil
		},
	}
}

func write(w io.Writer, r *storev1.GetStatusResponse) {
	output.Row(w, "Member", r.GetName())
	output.Row(w, "Epoch", r.GetEpoch())
	output.Row(w, "Cluster", r.GetClusterId())
	output.Row(w, "Clients", r.GetClientAddress())
	output.Row(w, "Database", fmt.Sprintf("%d bytes, %d of them used, at most %d",
		r.GetDatabaseBytes(), r.GetDatabaseUsedBytes(), r.GetDatabaseLimitBytes()))
	output.Row(w, "Version", r.GetService().GetVersion())
	for _, p := range r.GetService().GetProblems() {
		output.Row(w, "Problem", p.GetText())
	}
	fmt.Fprintln(w)
	output.Table(w, []output.Column[*storev1.Member]{
		{Header: "MEMBER", Cell: func(m *storev1.Member) any { return m.GetName() }},
		{Header: "ADDRESS", Cell: func(m *storev1.Member) any { return m.GetAddress() }},
		{Header: "VOTE", Cell: func(m *storev1.Member) any { return yes(m.GetVoting()) }},
		{Header: "LEADER", Cell: func(m *storev1.Member) any { return yes(m.GetLeader()) }},
	}, r.GetMembers())
	fmt.Fprintln(w)
	output.Table(w, []output.Column[*storev1.Node]{
		{Header: "NODE", Cell: func(n *storev1.Node) any { return n.GetName() }},
		{Header: "CERTIFICATE UNTIL", Cell: func(n *storev1.Node) any {
			if n.GetExpiryTime() == nil {
				return "" // it uses the socket of a member
			}
			return n.GetExpiryTime().AsTime().Format(time.RFC3339)
		}},
	}, r.GetNodes())
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func createTokenCommand(inv *invocation.Invocation) *cobra.Command {
	req, valid := &storev1.CreateJoinTokenRequest{}, time.Duration(0)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Make a token by which one machine joins, once",
		Long: `Make a join token and print it. The token is secret until it is used or expires. Pass it to
"sluice store join" on the machine that joins.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if valid < time.Second || valid > 24*time.Hour {
				return invocation.Usagef("--valid-for: %s is not between 1s and 24h", valid)
			}
			req.ValidFor = durationpb.New(valid)
			r, err := invocation.Ask(cmd.Context(), inv, invocation.Store, client.CreateJoinToken, req)
			if err != nil {
				return err
			}
			return inv.Show(message.Of(r), func(w io.Writer) { fmt.Fprintln(w, r.GetToken()) })
		},
	}
	cmd.Flags().StringVar(&req.Node, "node", "",
		"only this node may use the token, also to replace a machine of that name (default: any new node)")
	cmd.Flags().BoolVar(&req.Member, "member", false, "the machine becomes a member of the store")
	cmd.Flags().DurationVar(&valid, "valid-for", time.Hour, "how long the token is valid, at most 24h")
	return cmd
}

func revokeCommand(inv *invocation.Invocation) *cobra.Command {
	req := &storev1.RevokeNodeRequest{}
	cmd := &cobra.Command{
		Use:   "revoke NODE",
		Short: "Withdraw the credentials of a node",
		Long: `Withdraw the credentials of a node. Its connections end, and the store neither accepts nor
renews its certificate. The node's keys in the store stay until the node is forgotten: see
"sluice node forget".`,
		Args: invocation.Args(1, "a node"),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Node = args[0]
			r, err := invocation.Ask(cmd.Context(), inv, invocation.Store, client.RevokeNode, req)
			if err != nil {
				return err
			}
			return inv.Show(message.Of(r), func(w io.Writer) {
				switch {
				case !r.GetRevoked():
					fmt.Fprintln(w, output.Printable("Node "+req.GetNode()+" has no credentials."))
				case req.GetValidateOnly():
					fmt.Fprintln(w, "Nothing was changed: --dry-run.")
				default:
					fmt.Fprintln(w, output.Printable("The credentials of node "+req.GetNode()+" are withdrawn."))
				}
			})
		},
	}
	invocation.ValidateFlag(cmd, &req.ValidateOnly, "show whether the node has credentials; change nothing")
	return cmd
}

func removeMemberCommand(inv *invocation.Invocation) *cobra.Command {
	req := &storev1.RemoveMemberRequest{}
	cmd := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a member that was lost",
		Long: `Remove another member of the store. Run the command on a machine that stays a member. A
member that has never started is named by its address.`,
		Args: invocation.Args(1, "a member"),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name = args[0]
			r, err := invocation.Ask(cmd.Context(), inv, invocation.Store, client.RemoveMember, req)
			if err != nil {
				return err
			}
			return inv.Show(message.Of(r), func(w io.Writer) {
				if req.GetValidateOnly() {
					fmt.Fprintln(w, "Nothing was changed: --dry-run.")
					return
				}
				fmt.Fprintln(w, output.Printable("Member "+req.GetName()+" is removed."))
			})
		},
	}
	invocation.ValidateFlag(cmd, &req.ValidateOnly, "check that the member exists; remove nothing")
	return cmd
}

func saveCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "save FILE",
		Short: "Save a copy of the store's data in a new file",
		Long: `Save a copy of the data of the store in a new file with mode 0600, or write it to standard
output (-). The file has the format of "etcdctl snapshot save". Keep it secret. It does not
contain the keys of the certificates: keep a copy of /var/lib/sluice/store/member.json with it.`,
		Args: invocation.Args(1, "a file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "-" {
				_, err := saveTo(cmd.Context(), inv, cmd.OutOrStdout())
				return err
			}
			size, err := save(cmd.Context(), inv, args[0])
			if err != nil {
				return err
			}
			return inv.Show(map[string]any{"file": args[0], "bytes": size}, func(w io.Writer) {
				fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s has %d bytes.", args[0], size)))
			})
		},
	}
}

// save writes a snapshot to a new file, which it removes if the snapshot is not complete.
func save(ctx context.Context, inv *invocation.Invocation, path string) (size int64, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	if size, err = saveTo(ctx, inv, f); err != nil {
		return 0, err
	}
	return size, f.Sync()
}

// saveTo writes a snapshot, which is not complete if there is an error.
func saveTo(ctx context.Context, inv *invocation.Invocation, w io.Writer) (size int64, err error) {
	err = invocation.Stream(ctx, inv, invocation.Store, client.SaveSnapshot, &storev1.SaveSnapshotRequest{},
		func(m *storev1.SaveSnapshotResponse) error {
			n, err := w.Write(m.GetData())
			size += int64(n)
			return err
		})
	return size, err
}
