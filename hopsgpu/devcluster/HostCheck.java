package hopsgpu;

import io.netty.buffer.Unpooled;
import io.netty.channel.ChannelFutureListener;
import io.netty.channel.ChannelHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.util.ReferenceCountUtil;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import javax.servlet.Filter;
import javax.servlet.FilterChain;
import javax.servlet.FilterConfig;
import javax.servlet.ServletException;
import javax.servlet.ServletRequest;
import javax.servlet.ServletResponse;
import javax.servlet.http.HttpServletRequest;
import javax.servlet.http.HttpServletResponse;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.http.FilterContainer;
import org.apache.hadoop.http.FilterInitializer;

/**
 * Refuses HTTP requests whose Host header is no address and no name of the cluster.
 *
 * <p>A web page whose owner resolves its name to this machine (DNS rebinding) could otherwise read
 * and write as the cluster's user. Its requests have the page's name in this header.
 */
public final class HostCheck {
  private static final String HOSTS = "hopsgpu.hosts";
  private static final String MESSAGE = "This cluster has no such host name.\n";

  private final Set<String> names;

  private HostCheck(Set<String> names) {
    this.names = names;
  }

  private static HostCheck ofHostsFile(String file) throws IOException {
    Set<String> names = new HashSet<>();
    for (String line : Files.readAllLines(Path.of(file))) {
      String[] fields = line.trim().split("\\s+");
      for (int i = 1; i < fields.length; i++) {
        names.add(fields[i].toLowerCase(Locale.ROOT));
      }
    }
    return new HostCheck(names);
  }

  private boolean accepts(String host) {
    if (host == null) {
      return false;
    }
    // An address is no name that somebody could resolve to this machine.
    if (host.matches("\\[[0-9A-Fa-f:.]+\\](:\\d+)?|\\d+(\\.\\d+){3}(:\\d+)?")) {
      return true;
    }
    return names.contains(host.replaceFirst(":\\d+$", "").toLowerCase(Locale.ROOT));
  }

  /** Adds the check to every page of a daemon; for hadoop.http.filter.initializers. */
  public static final class Initializer extends FilterInitializer {
    @Override
    public void initFilter(FilterContainer container, Configuration conf) {
      Map<String, String> parameters =
          new HashMap<>(Collections.singletonMap(HOSTS, conf.get(HOSTS)));
      container.addGlobalFilter("host", ServletFilter.class.getName(), parameters);
    }
  }

  /** The check of a daemon's pages. */
  public static final class ServletFilter implements Filter {
    private HostCheck check;

    @Override
    public void init(FilterConfig config) throws ServletException {
      try {
        check = ofHostsFile(config.getInitParameter(HOSTS));
      } catch (IOException e) {
        throw new ServletException(e);
      }
    }

    @Override
    public void doFilter(ServletRequest request, ServletResponse response, FilterChain chain)
        throws IOException, ServletException {
      if (check.accepts(((HttpServletRequest) request).getHeader("Host"))) {
        chain.doFilter(request, response);
      } else {
        ((HttpServletResponse) response).setStatus(HttpServletResponse.SC_FORBIDDEN);
        response.setContentType("text/plain");
        response.getWriter().write(MESSAGE);
      }
    }

    @Override
    public void destroy() {}
  }

  /** The check of a DataNode's files; for dfs.datanode.httpserver.filter.handlers. */
  @ChannelHandler.Sharable
  public static final class DataNodeHandler extends ChannelInboundHandlerAdapter {
    private final HostCheck check;

    public DataNodeHandler(HostCheck check) {
      this.check = check;
    }

    /** The DataNode finds this method by its name. */
    public static HostCheck initializeState(Configuration conf) throws IOException {
      return ofHostsFile(conf.get(HOSTS));
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
      if (!(message instanceof HttpRequest)
          || check.accepts(((HttpRequest) message).headers().get("Host"))) {
        context.fireChannelRead(message);
        return;
      }
      ReferenceCountUtil.release(message);
      DefaultFullHttpResponse response =
          new DefaultFullHttpResponse(
              HttpVersion.HTTP_1_1,
              HttpResponseStatus.FORBIDDEN,
              Unpooled.copiedBuffer(MESSAGE, StandardCharsets.UTF_8));
      response.headers().set("Content-Type", "text/plain");
      response.headers().set("Content-Length", response.content().readableBytes());
      context.writeAndFlush(response).addListener(ChannelFutureListener.CLOSE);
    }
  }
}
